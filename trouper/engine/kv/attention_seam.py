"""The seam into mlx-lm's attention: `scaled_dot_product_attention` is replaced in the modules that
import the name (pinned by tests/engine/test_banks.py)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import base

from trouper.engine.encoders.encoder import window_mask
from trouper.engine.kv import decode_attention, prefill_attention
from trouper.engine.kv.model_caches import ListSlots, begin, pass_fault, slot_caches, state_slots
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.recurrent_state import StateSlots
from trouper.engine.kv.slot_cache import PassOffsets, SlotCache
from trouper.engine.kv.whole_buffer import WholeBuffer
from trouper.engine.passes.region import Region
from trouper.engine.products import blocked_attention

# Everything but attention runs over all rows at once. `JoinedSlots` writes each row's keys and
# values into the row's bank, and returns `Parts`, which the model passes to
# `scaled_dot_product_attention`: the seam (`attention_seam.py`) that calls attention once for each
# bank.


@attrs.frozen(eq=False)
class Parts:
    """Keys, values or masks of each bank."""

    # Not an array: a model that computes with keys fails when the pass is built, and has no banks
    # (`Capabilities.banks`).

    of_banks: Sequence[Any]
    ranges: Sequence[slice]
    """Rows of the pass by bank."""

    def changed(self, change: Callable[[Any], Any]) -> Self:
        return attrs.evolve(self, of_banks=[change(each) for each in self.of_banks])


class JoinedSlots(PassOffsets):
    """The caches of one layer in several banks, with mlx-lm's interface."""

    def __init__(
        self, caches: Sequence[SlotCache], region: Region, ranges: Sequence[slice]
    ) -> None:
        """`region`: all rows of the pass. `ranges`: rows by bank."""
        self._caches, self._region, self._ranges = caches, region, ranges
        self.traits = caches[0].traits

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Write (n, heads, width, dim); return keys and values of each bank."""
        fetched = [
            cache.update_and_fetch(keys[rows], values[rows])  # type: ignore[attr-defined]
            for cache, rows in zip(self._caches, self._ranges, strict=True)
        ]
        self._updated = True
        return self._parts(fetched)

    def keys_and_values(self) -> tuple[Parts, Parts]:
        """Keys and values of each bank again, for layers that share KV."""
        caches: Sequence[Any] = self._caches
        return self._parts([cache.keys_and_values() for cache in caches])

    def _parts(self, fetched: Sequence[tuple[mx.array, mx.array]]) -> tuple[Parts, Parts]:
        keys, values = zip(*fetched, strict=True)
        return Parts(keys, self._ranges), Parts(values, self._ranges)

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> Parts | None:
        """The mask of each bank (see `FullSlots.make_mask`)."""
        caches: Sequence[Any] = self._caches
        masks = [cache.make_mask(width, return_array, window_size) for cache in caches]
        return None if all(mask is None for mask in masks) else Parts(masks, self._ranges)


def joined(caches: Sequence[Sequence[Any]], region: Region, ranges: Sequence[slice]) -> list[Any]:
    """Join the equally nested caches of several banks. All banks share recurrent states."""
    return [_join(same, region, ranges) for same in zip(*caches, strict=True)]


def _join(same: Sequence[Any], region: Region, ranges: Sequence[slice]) -> Any:
    if isinstance(same[0], ListSlots):
        return ListSlots(*joined([cache.caches for cache in same], region, ranges))
    return same[0] if isinstance(same[0], StateSlots) else JoinedSlots(same, region, ranges)


NAME = "scaled_dot_product_attention"
plain = base.scaled_dot_product_attention
_replaced = {plain}
OPTIONS = ("scale", "mask", "sinks")
"""After the cache."""


def scaled_dot_product_attention(
    queries: mx.array, keys: Any, values: Any, cache: Any = None, *args: Any, **options: Any
) -> mx.array:
    """Attention over keys of one bank or several. queries (n, heads, width, dim). `options`: scale,
    mask, sinks."""
    options |= zip(OPTIONS, args, strict=False)
    mask = options.pop("mask", None)
    if (both_sides := getattr(_passes, "both_sides", None)) is not None:
        mask = both_sides(queries.shape[2], isinstance(mask, mx.array))
    if not isinstance(keys, Parts):
        return _attend(queries, keys, values, cache, mask=mask, **options)
    masks = mask.of_banks if isinstance(mask, Parts) else [None] * len(keys.ranges)
    if mask is not None and not isinstance(mask, Parts):
        raise TypeError("a mask over the rows of several banks")
    outputs = [
        _attend(queries[rows], keys_of_bank, values_of_bank, None, mask=mask_of_bank, **options)
        for rows, keys_of_bank, values_of_bank, mask_of_bank in zip(
            keys.ranges, keys.of_banks, values.of_banks, masks, strict=True
        )
    ]
    return mx.concatenate(outputs)


def _attend(
    queries: mx.array, keys: Any, values: Any, cache: Any, *, mask: Any, **options: Any
) -> mx.array:
    if isinstance(keys, WholeBuffer):
        kernel = prefill_attention if keys.region.tiled else decode_attention
        if not isinstance(mask, mx.array):  # None or "causal": a kernel masks by the lengths.
            if kernel.supports(queries, keys, values, options):
                return kernel.attend(queries, keys, values, options)
            mask = keys.mask()
        keys, values = keys.view(), values.view()
    elif _is_cut(mask, keys):
        keys, values = (part[:, :, : mask.shape[-1]] for part in (keys, values))
    if (calls := getattr(_passes, "calls", None)) is not None:
        calls.append(AttentionCall(queries, keys, values, {**options, "mask": mask}))
    if blocked_attention.pays(queries, keys, values, mask, options):
        return blocked_attention.attend(queries, keys, values, mask=mask, scale=options["scale"])
    return plain(queries, keys, values, cache, mask=mask, **options)


def _is_cut(mask: Any, keys: Any) -> bool:
    """Whether the model has cut the mask behind the longest row, where rounded keys go on."""
    return (
        isinstance(mask, mx.array)
        and isinstance(keys, mx.array)
        and 1 < mask.shape[-1] < keys.shape[2]
    )


@attrs.frozen(eq=False)
class AttentionCall:
    queries: mx.array
    keys: Any
    values: Any
    options: dict[str, Any]


_passes = threading.local()
"""State of the pass that each thread builds: `both_sides`, a mask of all tokens, and recorded
`calls`."""


@contextmanager
def bidirectional(reach: int | None, padding: mx.array | None) -> Iterator[None]:
    """Let tokens on this thread attend to later ones. `reach`: maximum distance in layers with
    array masks. `padding`: (rows, 1, 1, width), False for padding."""

    def both_sides(width: int, is_windowed: bool) -> mx.array | None:
        if reach is None or not is_windowed:
            return padding
        return window_mask(width, reach, padding)

    _passes.both_sides = both_sides
    try:
        yield
    finally:
        del _passes.both_sides


@contextmanager
def recording() -> Iterator[list[AttentionCall]]:
    """Collect this thread's calls of attention that is not a kernel of ours, lazily."""
    _passes.calls = calls = list[AttentionCall]()
    try:
        yield calls
    finally:
        del _passes.calls


def install(*models: nn.Module | None) -> None:
    modules = (
        module for model in models if model is not None for _, module in model.named_modules()
    )
    for name in {type(module).__module__ for module in modules}:
        if getattr(sys.modules.get(name), NAME, None) in _replaced:
            setattr(sys.modules[name], NAME, scaled_dot_product_attention)


def replace_too(function: Callable[..., Any]) -> None:
    """Replace another package's function with mlx-lm's semantics."""
    _replaced.add(function)


def fault(model: nn.Module) -> str:
    """Why decoding rows of two banks fail, or "". Installs the seam; evaluates nothing."""
    install(model)
    states = state_slots(model)
    banks = [slot_caches(model, PLAIN, states=states) for _ in range(2)]
    ranges = slice(0, 1), slice(1, 2)
    region = Region(0, np.array([3, 5], np.int32), np.ones(2, np.int32), 1)
    for caches, rows in zip(banks, ranges, strict=True):
        begin(caches, Region(0, region.lengths[rows], region.counts[rows], 1), prefilling=False)
    return pass_fault(model, joined(banks, region, ranges), region)
