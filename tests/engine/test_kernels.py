"""What MLX's CUDA build is told. That it matters was seen on two H200s: after 512 shapes of prompts the engine raised
"Cache thrashing is happening", and every request with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trouper.engine.platform.cuda_environment import THRASHING_CHECK, allow_any_shapes

PROBE = f"import trouper.engine, os, sys; print(os.environ[{THRASHING_CHECK!r}], 'mlx.core' in sys.modules)"


def test_any_number_of_shapes_is_allowed_before_mlx_is_there() -> None:
    """MLX reads it once."""
    environment = {name: value for name, value in os.environ.items() if name != THRASHING_CHECK}
    said = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True, env=environment)
    assert said.stdout.split() == ["0", "False"]


def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THRASHING_CHECK, "1")
    allow_any_shapes()
    assert os.environ[THRASHING_CHECK] == "1"
