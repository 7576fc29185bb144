"""mlx-lm multiplies by the matrices of queries, keys and values one by one, which get one input.

Fault: five products a layer could be two launches.
Seen: mlx-lm 0.32.2.
Upstream: by design.
Without: more time to launch a decode step on CUDA (docs/performance.md).
"""

# The matrices lie one behind the other, and are multiplied in one launch. mlx-lm's models call each
# layer by itself: the first layer that is called computes the results of all, and the others find
# theirs by the identity of the input. If one is not called with that input (a layer that has keys
# of another one, say), the layers multiply by themselves from then on.

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import attrs
import mlx.core as mx
from mlx import nn

from trouper import workarounds

NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of a module with the same input."""
PARTS = ("weight", "scales", "biases", "bias")
FORMAT = ("bits", "group_size", "mode")
MERGED = "merged"
"""Key in a layer's `__dict__` of (group, index)."""
Multiply = Callable[[Any, mx.array, tuple[int, ...]], Sequence[mx.array] | None]
"""From (merged layer, input, sizes) to results; None: layers multiply by themselves."""


@attrs.define(eq=False)
class MergedLayers:
    """A group's matrices; references to layers would be cycles."""

    layer: nn.Module
    sizes: tuple[int, ...]
    """Number of outputs of each."""
    _parts: list[mx.array]
    """Views of the matrix of `layer`."""
    apart: bool = False
    """Whether layers multiply by themselves, since inputs differed."""
    _input: mx.array | None = None
    _results: dict[int, mx.array] = attrs.field(factory=dict)
    """Results for `_input` that no layer has taken, by index."""

    def result(
        self, index: int, weight: mx.array, x: mx.array, multiply: Multiply
    ) -> mx.array | None:
        """None: the layer with matrix `weight` multiplies by itself."""
        if self.apart or self._parts[index] is not weight:
            return None
        if self._input is not x:
            self.apart = bool(self._results)
            self._results.clear()
            self._input = None
        elif (made := self._results.pop(index, None)) is not None:
            if not self._results:
                self._input = None
            return made
        if self.apart or self._results or (all_made := multiply(self.layer, x, self.sizes)) is None:
            return None
        self._input, self._results = x, dict(enumerate(all_made))
        return self._results.pop(index)


def merge(model: nn.Module, kinds: Sequence[type[nn.Module]], block: int) -> None:
    """Merge layers of these kinds, lazily. `block`: outputs that a kernel computes at once."""
    for _, module in model.named_modules() if workarounds.is_active(__name__) else ():
        for names in NAMES:
            layers = [module.get(name) for name in names]
            if (
                type(layers[0]) in kinds
                and MERGED not in layers[0].__dict__
                and _alike(layers, block)
            ):
                _merge(layers)


def separate(layer: nn.Module) -> None:
    layer.__dict__.pop(MERGED, None)


def result(layer: Any, x: mx.array, multiply: Multiply) -> mx.array | None:
    found: tuple[MergedLayers, int] | None = layer.__dict__.get(MERGED)
    return None if found is None else found[0].result(found[1], layer.weight, x, multiply)


def _alike(layers: Sequence[Any], block: int) -> bool:
    """Whether layers differ in weights and sizes alone, and no block spans two."""
    forms = {_form(layer) for layer in layers}
    return len(forms) == 1 and all(layer.weight.shape[0] % block == 0 for layer in layers[:-1])


def _form(layer: Any) -> object:
    if not isinstance(layer, nn.Module):
        return None
    parts = [(part, layer[part].dtype, layer[part].shape[1:]) for part in PARTS if part in layer]
    return type(layer), *parts, *(getattr(layer, name, None) for name in FORMAT)


def _merge(layers: Sequence[Any]) -> None:
    """Concatenate the layers' parameters into one layer's; theirs become views."""
    first, sizes = layers[0], tuple(layer.weight.shape[0] for layer in layers)
    of_all: Any = dict.__new__(type(first))
    nn.Module.__init__(of_all)
    for name in FORMAT:
        if hasattr(first, name):
            setattr(of_all, name, getattr(first, name))
    for part in PARTS:
        if part in first:
            of_all[part] = mx.concatenate([layer[part] for layer in layers])
            for layer, view in zip(layers, split(of_all[part], sizes, axis=0), strict=True):
                layer[part] = view
    group = MergedLayers(of_all, sizes, [layer.weight for layer in layers])
    for index, layer in enumerate(layers):
        layer.__dict__[MERGED] = group, index


def split(array: mx.array, sizes: Sequence[int], axis: int) -> list[mx.array]:
    """Views of these sizes."""
    return cast(list[mx.array], mx.split(array, [*accumulate(sizes)][:-1], axis=axis))
