"""One layer's caches of several banks, in a pass over the rows of all."""

# Everything but attention runs over all rows at once. `JoinedSlots` writes each row's keys and
# values into the row's bank, and returns `Parts`, which the model passes to
# `scaled_dot_product_attention`: the seam (`attention_seam.py`) that calls attention once for each
# bank.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from trouper.engine.kv.model_caches import ListSlots
from trouper.engine.kv.recurrent_state import StateSlots
from trouper.engine.kv.slot_cache import SlotCache
from trouper.engine.passes.region import Region


@attrs.frozen(eq=False)
class Parts:
    """Keys, values or masks of each bank. Not an array: a model that computes with keys fails when
    the pass is built, and has no banks (`Capabilities.banks`)."""

    of_banks: Sequence[Any]
    ranges: Sequence[slice]
    """Rows of the pass by bank."""


class JoinedSlots:
    """The caches of one layer in several banks, with mlx-lm's interface."""

    def __init__(
        self, caches: Sequence[SlotCache], region: Region, ranges: Sequence[slice]
    ) -> None:
        """`region`: all rows of the pass. `ranges`: rows by bank."""
        self._caches, self.region, self._ranges = caches, region, ranges
        self._updated = False

    @property
    def offset(self) -> mx.array | int:
        """Rope offset of each row, (n,) int32 (see `SlotCache.offset`)."""
        if self._caches[0].traits.counts_from_zero:
            return 0
        return self.region.after if self._updated else self.region.offset

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
        return self._parts([cache.keys_and_values() for cache in self._caches])  # type: ignore[attr-defined]

    def _parts(self, fetched: Sequence[tuple[mx.array, mx.array]]) -> tuple[Parts, Parts]:
        keys, values = zip(*fetched, strict=True)
        return Parts(keys, self._ranges), Parts(values, self._ranges)

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> Parts | None:
        """The mask of each bank (see `FullSlots.make_mask`)."""
        masks = [cache.make_mask(width, return_array, window_size) for cache in self._caches]  # type: ignore[attr-defined]
        return None if all(mask is None for mask in masks) else Parts(masks, self._ranges)


def joined(caches: Sequence[Sequence[Any]], region: Region, ranges: Sequence[slice]) -> list[Any]:
    """Join the equally nested caches of several banks. All banks share recurrent states."""

    def join(same: Sequence[Any]) -> Any:
        if isinstance(same[0], ListSlots):
            return ListSlots(*map(join, zip(*(cache.caches for cache in same), strict=True)))
        return same[0] if isinstance(same[0], StateSlots) else JoinedSlots(same, region, ranges)

    return [join(same) for same in zip(*caches, strict=True)]
