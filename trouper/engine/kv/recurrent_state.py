"""Recurrent state of many rows. Recurrent state has no positions, so padding cannot be masked: rows prefill one at a time."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from trouper.engine.kv.region import Region


class StateSlots:
    """Decoding rows share one ArraysCache, in slot order; each prefilling row has its own.

    mlx-lm's own batch prefill is wrong for the models that ignore lengths (jamba, rwkv7,
    recurrent_gemma, bailing_moe_linear) and for "no state yet", which some treat unlike zeros.
    """

    def __init__(self, size: int, history: int | None = None) -> None:
        """`history`: the state consists of the last `history` tokens, with zeros where a row has fewer."""
        self._size = size
        self._history = history
        self._decoding = ArraysCache(size)
        self._decoding_rows = 0
        self._prefilling: list[ArraysCache] = []
        self._current: ArraysCache = self._decoding

    @property
    def view(self) -> ArraysCache:
        """The cache that the model gets for the pass."""
        return self._current

    def begin(self, region: Region) -> None:
        """Choose the cache for the next pass: over all decoding rows, or over one prefilling row."""
        if region.stop <= self._decoding_rows:
            assert region.start == 0, "all decoding rows step together"
            self._current = self._decoding
        else:
            assert region.stop - region.start == 1, "recurrent rows prefill one at a time"
            self._current = self._prefilling[region.start - self._decoding_rows]

    def finish(self) -> None:
        self._current = self._decoding

    def open(self) -> None:
        """Append a new prefilling row."""
        row = ArraysCache(self._size)
        if self._history is not None:
            row[0] = mx.zeros((1, self._history), mx.int64)
        self._prefilling.append(row)

    def promote(self, index: int) -> None:
        """Make the prefilling row at `index` (among prefilling rows) the last decoding row; the first one moves to `index`."""
        rows = self._prefilling
        rows[0], rows[index] = rows[index], rows[0]
        row = rows.pop(0)
        if self._decoding_rows == 0:
            self._decoding = row
        else:
            self._decoding.cache = [
                mx.concatenate([*pair]) for pair in zip(self._decoding.cache, row.cache, strict=True)
            ]
        self._decoding_rows += 1

    def keep(self, decoding: list[int], prefilling: list[int]) -> None:
        """Keep only these rows, in this order (indices within each kind)."""
        self._prefilling = [self._prefilling[index] for index in prefilling]
        if not decoding:
            self._decoding = ArraysCache(self._size)
        elif decoding != list(range(self._decoding_rows)):
            order = mx.array(decoding)
            self._decoding.cache = [state[order] for state in self._decoding.cache]
        self._decoding_rows = len(decoding)

    def snapshot(self, index: int) -> list[mx.array]:
        """Copy the states (1, ...) of the row at `index`, where decoding rows come first."""
        decoding = index < self._decoding_rows
        cache, row = (self._decoding, index) if decoding else (self._prefilling[index - self._decoding_rows], 0)
        return [state[mx.array([row])] for state in cache.cache]

    def restore(self, index: int, states: Sequence[mx.array]) -> None:
        """Set a prefilling row's states to a snapshot. The arrays are copied, since models may assign to what they get."""
        self._prefilling[index - self._decoding_rows].cache = [mx.contiguous(state) for state in states]

    def state(self) -> list[mx.array]:
        """Return the states of all rows: (rows, ...) of decoding rows, then (1, ...) of each prefilling row."""
        caches = [self._decoding, *self._prefilling]
        return [state for cache in caches for state in cache.cache if state is not None]

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.state())

    def clear(self) -> None:
        self.keep([], [])
