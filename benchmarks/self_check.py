"""`just bench-self-check`: what the self-check of a start costs, of a checkpoint or of a published
shape with random weights.

A checkpoint (default: the embedded model) is loaded as a server does it, with --self-check off,
fast with nothing remembered, fast again, and full. A shape (`--shape Qwen3-4B`) is made in memory,
in the device's own precision, and only the check runs.
"""

from __future__ import annotations

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from rich.console import Console
from rich.table import Table

from tests.self_check.full_size import FULL_SIZE
from trouper.engine.host import MlxEngine
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.loading import model_loading
from trouper.engine.platform import device
from trouper.engine.self_check import tiny
from trouper.engine.self_check.checking import Check
from trouper.engine.self_check.starting import line_of
from trouper.protocol.capabilities import SelfCheck
from trouper.protocol.settings import Settings, default_cache_dir

_ = MlxEngine  # What a server imports takes its time before, not within what is measured.
CHECKPOINT_RUNS = (
    ("off", "off"),
    ("fast, nothing remembered", "fast"),
    ("fast, remembered", "fast"),
    ("full", "full"),
)
SHAPE_RUNS = ("fast, first in this process", "fast, again")


def of_checkpoint(model: str | None, table: Table, console: Console) -> None:
    """In a cache directory of its own, so that nothing is remembered; the embedded model stays
    where it is."""
    path = model or str(_embedded())
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name, mode in CHECKPOINT_RUNS:
            began = time.perf_counter()
            card = model_loading.load(
                Settings(model=path, no_ssd=True, self_check=mode), lambda _: None
            ).card
            took = time.perf_counter() - began
            check = (
                f"{card.self_check.seconds:.2f}"
                if mode != "off" and not card.self_check.remembered
                else "0"
            )
            table.add_row(
                card.architecture,
                name,
                check,
                f"{took:.2f}",
                ", ".join(card.capabilities.off) or "nothing",
            )
            console.print(line_of(card.capabilities, card.self_check))


def _embedded() -> Path:
    from trouper.engine.loading import bundled_model

    return bundled_model.directory(default_cache_dir())


def of_shape(name: str, table: Table, console: Console) -> None:
    config = FULL_SIZE[name]
    model = random_weights(config)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    console.print(f"{name}: {weights / 1e9:.1f} GB of random weights on {device.name()}")
    for run in SHAPE_RUNS:
        began = time.perf_counter()
        found = Check(model, config, int(config_vocabulary(config)), PLAIN, "fast").run()
        took = time.perf_counter() - began
        table.add_row(name, run, f"{took:.2f}", "-", ", ".join(found.capabilities.off) or "nothing")
        console.print(
            line_of(found.capabilities, SelfCheck(mode="fast", checked=found.checked, seconds=took))
        )


def config_vocabulary(config: Mapping[str, Any]) -> int:
    return int((config.get("text_config") or config)["vocab_size"])


def random_weights(config: Mapping[str, Any]) -> Any:
    """As layers draw them; one after another, since each is float32 for a moment."""
    model = tiny.empty(config)
    dtype = mx.float32 if device.is_cpu() else mx.bfloat16
    left, made = tree_flatten(model.parameters())[::-1], []
    while left:  # Each is let go of before the next one is computed.
        path, array = left.pop()
        typed = array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
        mx.eval(typed)
        made.append((path, typed))
        model.update(tree_unflatten([(path, typed)]))
        mx.clear_cache()
    model.eval()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "model", nargs="?", help="directory of a checkpoint; default: the embedded model"
    )
    parser.add_argument(
        "--shape", action="append", choices=sorted(FULL_SIZE), help="a published shape; repeatable"
    )
    chosen = parser.parse_args()
    console, table = Console(), Table("model", "--self-check", "check s", "start s", "turned off")
    for shape in chosen.shape or ():
        of_shape(shape, table, console)
    if not chosen.shape:
        of_checkpoint(chosen.model, table, console)
    console.print(table)


if __name__ == "__main__":
    main()
