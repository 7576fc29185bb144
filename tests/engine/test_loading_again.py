"""Loading a model again and again leaves nothing behind."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.families import save
from trouper.engine.loading.weights import opened


def test_the_splits_of_the_random_key_are_not_kept(tmp_path: Path) -> None:
    """Initial weights are drawn and never computed; MLX's key would keep a graph of all draws for
    as long as the process lives."""
    directory = save("llama", tmp_path / "model")
    for _ in range(2):
        opened(directory)
    graph = io.StringIO()
    state: Any = mx.random.state
    mx.export_to_dot(graph, *state)
    assert "RandomBits" not in graph.getvalue() and "Split" not in graph.getvalue()
