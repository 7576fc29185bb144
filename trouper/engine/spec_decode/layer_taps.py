"""Taps: hidden states behind some layers of a model, which drafters read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from trouper.workarounds.mlx_call_hooks import hook_calls

_passes = threading.local()
"""`outputs`: of tapped layers in the pass that each thread builds, by the layer's id."""


@attrs.frozen(eq=False)
class LayerTaps:
    layers: Sequence[nn.Module]

    def run(self, model: nn.Module, tokens: mx.array, cache: Any) -> tuple[Any, mx.array]:
        """Run tokens (n, width). Returns the model's output, and the layers' hidden states (n,
        width, layers * dim). Raises `ValueError` if a layer returns none."""
        outputs: dict[int, Any] = {}
        _passes.outputs = outputs
        try:
            with hook_calls(self.layers, _keep):
                output = model(tokens, cache=cache)
        finally:
            del _passes.outputs
        return output, mx.concatenate([_states(outputs.get(id(e))) for e in self.layers], axis=-1)


def _states(output: Any) -> mx.array:
    if not isinstance(output, mx.array) or output.ndim != 3:
        raise ValueError("the model's layers return no hidden states (rows, tokens, dim)")
    return output


def _keep(kind: Any, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    output = kind.__call__(module, *args, **options)
    _passes.outputs[id(module)] = output
    return output
