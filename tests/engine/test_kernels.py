"""What MLX's CUDA build is told. That it matters was seen on two H200s: after 512 shapes of prompts
the engine raised "Cache thrashing is happening", and every request with it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from trouper import process
from trouper.process import (
    GRAPHS,
    NCCL_HOST,
    SMALL_GRAPHS,
    THRASHING_CHECK,
    cuda_build,
    prepare_cuda,
)

PROBE = (
    "import os, sys; from trouper.process import prepare_process; prepare_process(); "
    f"print(os.environ[{THRASHING_CHECK!r}], 'mlx.core' in sys.modules)"
)


def test_any_number_of_shapes_is_allowed_before_mlx_is_there() -> None:
    """MLX reads it once."""
    environment = {name: value for name, value in os.environ.items() if name != THRASHING_CHECK}
    said = subprocess.run(
        [sys.executable, "-c", PROBE], check=True, capture_output=True, text=True, env=environment
    )
    assert said.stdout.split() == ["0", "False"]


def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THRASHING_CHECK, "1")
    prepare_cuda()
    assert os.environ[THRASHING_CHECK] == "1"


@pytest.mark.parametrize("cuda", [False, True])
def test_graphs_are_small_in_the_build_for_cuda_alone(
    cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / ("mlx_cuda_13-0.32.4.dist-info" if cuda else "mlx_metal-0.32.4.dist-info")).mkdir()
    for name in SMALL_GRAPHS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        process, "find_spec", lambda _: PathFinder.find_spec("mlx", [str(tmp_path)])
    )
    prepare_cuda()
    assert cuda_build() == cuda
    assert all((os.environ.get(name) == value) == cuda for name, value in SMALL_GRAPHS.items())


@pytest.mark.parametrize(
    ("rank", "wish", "graphs"), [("10.0.0.1", None, "0"), ("10.0.0.1", "1", "1"), ("", None, None)]
)
def test_ranks_between_gpus_have_no_graphs_unless_somebody_wants_them(
    rank: str, wish: str | None, graphs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "cuda_build", lambda: True)
    monkeypatch.setenv(NCCL_HOST, rank)
    for name in (GRAPHS, *SMALL_GRAPHS):
        monkeypatch.setenv(name, "set, so that the test's end takes it away")
        monkeypatch.delenv(name)
    if wish is not None:
        monkeypatch.setenv(GRAPHS, wish)
    prepare_cuda()
    assert os.environ.get(GRAPHS) == graphs
