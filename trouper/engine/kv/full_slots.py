"""Slots for attention over all tokens of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from trouper.engine.kv.slot_cache import SlotCache
from trouper.engine.passes.region import padded


class FullSlots(SlotCache):
    """The counterpart of mlx-lm's KVCache."""

    kernel_reads = True
    """Whether models hand what they get to attention as it is, so that kernels may read buffers."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write (n, heads, width, dim); return (n, heads, keys, dim). The mask hides foreign
        keys."""
        self._put([keys, values])
        return self.keys_and_values()

    def _put(self, parts: Sequence[mx.array]) -> None:
        # Write the pass's tokens. Each part (n, heads, width, any dim).
        region = self.region
        self.reserve(parts, region.stop, region.room)
        if region.level and not region.by_length:
            first = int(region.lengths[0])
            for buffer, part in zip(self.buffers, parts, strict=True):
                buffer[region.start : region.stop, :, first : first + region.width] = part
        else:
            self._scatter(parts)
        self._updated = True

    def keys_and_values(self) -> tuple[Any, Any]:
        """(n, heads, keys, dim) views of the pass's rows; for kernels, whole buffers."""
        keys, values = self.buffers
        return self._for_attention(keys, values)

    @property
    def _for_kernel(self) -> bool:
        return self.kernel_reads and (self.region.by_length or self.region.tiled)

    def _rows_of(self, buffer: mx.array) -> mx.array:
        view = self._view(buffer)
        return mx.contiguous(view) if self.region.copied else view

    def _view(self, buffer: mx.array) -> mx.array:
        # (n, heads, keys, any dim) view of the pass's rows.
        return buffer[self.region.start : self.region.stop, :, : self.region.keys]

    def read(self, slot: int, start: int, stop: int) -> list[mx.array]:
        """(heads, stop - start, dim) views of each buffer, to be copied before a buffer changes.
        Zeros behind the buffers' end: a draft model's context may be shorter."""
        return [padded(buffer[slot, :, start:stop], stop - start) for buffer in self.buffers]

    def write(self, slot: int, start: int, parts: Sequence[mx.array], room: int = 0) -> None:
        """Write tokens, as `read` returns, of a row that will have `room` tokens."""
        stop = start + parts[0].shape[1]
        self.reserve([part[None] for part in parts], slot + 1, max(stop, room))
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[slot, :, start:stop] = part

    def begin_with(self, parts: Sequence[Sequence[mx.array]], room: int) -> None:
        """Make the buffers for one slot from consecutive pieces (heads, any, dim) for each
        buffer."""
        assert not self.buffers and self.slots == 1, "somebody's KV would be lost"
        capacity, made = self.capacity_for(room), list[mx.array]()
        for pieces in parts:
            heads, _, dim = pieces[0].shape
            padding = capacity - sum(piece.shape[1] for piece in pieces)
            end = [mx.zeros((heads, padding, dim), pieces[0].dtype)] if padding else []
            made.append(mx.concatenate([*pieces, *end], 1)[None])
        self.buffers = made

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """A mask as of mlx-lm's KVCache: None, "causal", or (n, 1, width, keys) bool, True where a
        query attends to a key."""
        region, needs_array = self.region, self._needs_array(width, return_array)
        windowed = window_size is not None and region.longest > window_size
        if region.causal and not windowed and not needs_array:
            return None if width == 1 else "causal"
        if self._for_kernel and not windowed and not needs_array:
            return None
        return self._shape_mask(region.mask(window_size if windowed else None))

    def _mask(self) -> mx.array | str:
        # As `make_mask` without kernels.
        region = self.region
        return "causal" if region.causal and region.width > 1 else self._shape_mask(region.mask())


class OpenSlots(FullSlots):
    """Slots for models that write into caches: `keys` and `values` are the buffers."""

    # Such models set an indexer's unread values to zeros, and make a buffer that nothing reads a
    # dependency of one that is read, for its evaluation. Only the latter has an effect here.

    kernel_reads = False

    @property
    def keys(self) -> mx.array:
        return self.buffers[0]

    @keys.setter
    def keys(self, buffer: mx.array) -> None:
        self.buffers[0] = buffer

    @property
    def values(self) -> mx.array:
        return self.buffers[-1]

    @values.setter
    def values(self, buffer: mx.array) -> None:
        """Ignored: values of `update_and_fetch` stay."""


class ChunkSlots(FullSlots):
    """mlx-lm's ChunkedKVCache drops tokens behind a chunk; slots keep all."""

    start_position = 0

    def maybe_trim_front(self) -> None:
        """Nothing: all tokens are kept."""
