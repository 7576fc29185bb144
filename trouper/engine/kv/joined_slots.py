"""One layer's caches of several banks, as the model sees them in a pass over rows of all these
banks.

Such a pass runs every layer over all rows at once, except attention: rows of different banks have
buffers of different sizes. `JoinedSlots` stands in for the layer's cache. It writes each row's keys
and values into the row's bank, and returns `Parts`: the keys, values and masks of each bank. The
model passes them on to `scaled_dot_product_attention`, which is the seam (`attention_seam.py`) that
calls attention once for each bank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from trouper.engine.kv.model_caches import ListSlots
from trouper.engine.kv.recurrent_state import StateSlots
from trouper.engine.kv.region import Region
from trouper.engine.kv.slot_cache import SlotCache


@attrs.frozen(eq=False)
class Parts:
    """Keys, values or masks of each bank. Not an array: a model that computes with keys cannot use
    banks, and fails when its pass is built (`Capabilities.banks`)."""

    of_banks: Sequence[Any]
    ranges: Sequence[slice]
    """Rows of the pass that belong to each bank."""


class JoinedSlots:
    """The caches of one layer in several banks, with the interface that mlx-lm's models expect of a
    cache."""

    def __init__(
        self, caches: Sequence[SlotCache], region: Region, ranges: Sequence[slice]
    ) -> None:
        """`region`: all rows of the pass. `ranges`: those of each bank."""
        self._caches, self.region, self._ranges = caches, region, ranges
        self._updated = False

    @property
    def offset(self) -> mx.array | int:
        """Rope offset of each row, (n,) int32 (see `SlotCache.offset`)."""
        if self._caches[0].traits.counts_from_zero:
            return 0
        return self.region.after if self._updated else self.region.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Write (n, heads, width, dim); return the keys and values of each bank."""
        fetched = [
            cache.update_and_fetch(keys[rows], values[rows])  # type: ignore[attr-defined]
            for cache, rows in zip(self._caches, self._ranges, strict=True)
        ]
        self._updated = True
        return self._parts(fetched)

    def keys_and_values(self) -> tuple[Parts, Parts]:
        """Return the keys and values of each bank again, for layers that share them."""
        return self._parts([cache.keys_and_values() for cache in self._caches])  # type: ignore[attr-defined]

    def _parts(self, fetched: Sequence[tuple[mx.array, mx.array]]) -> tuple[Parts, Parts]:
        keys, values = zip(*fetched, strict=True)
        return Parts(keys, self._ranges), Parts(values, self._ranges)

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> Parts | None:
        """Return the mask of each bank (see `FullSlots.make_mask`)."""
        masks = [cache.make_mask(width, return_array, window_size) for cache in self._caches]  # type: ignore[attr-defined]
        return None if all(mask is None for mask in masks) else Parts(masks, self._ranges)


def joined(caches: Sequence[Sequence[Any]], region: Region, ranges: Sequence[slice]) -> list[Any]:
    """Join the nested caches of several banks, which have the same structure. Recurrent states are
    shared by all banks."""

    def join(same: Sequence[Any]) -> Any:
        if isinstance(same[0], ListSlots):
            return ListSlots(*map(join, zip(*(cache.caches for cache in same), strict=True)))
        return same[0] if isinstance(same[0], StateSlots) else JoinedSlots(same, region, ranges)

    return [join(same) for same in zip(*caches, strict=True)]
