"""KV of many rows in one buffer a layer: each row has a slot, left-aligned, with its own length.

mlx-lm's batch caches pad on the left: a row that joins, leaves or rejects draft tokens makes them copy the KV of
all rows. Here a row's tokens begin at 0 of its slot, so joining writes into one slot, leaving moves
one row, and rejecting tokens decreases a length. The interface towards the models is mlx-lm's.

One forward pass reads a contiguous range of slots: a `Region`. Buffers: (slots, heads, tokens, dim).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from trouper.engine.adaptations.cache_traits import USUAL, Traits
from trouper.engine.kv.pass_shapes import EXACT
from trouper.engine.kv.region import Region


class SlotCache:
    """Base of every layer's cache: the region of the pass, and buffers that grow."""

    def __init__(self, traits: Traits = USUAL) -> None:
        self.buffers: list[mx.array] = []
        """Keys and values, each with a slot for every row. Empty before the first write."""
        self._region: Region | None = None
        self._updated = False
        self._traits = traits
        self.slots = 0
        """Number of rows, with or without KV: buffers have a slot for each."""
        self.phase = 0
        """Number of tokens by which this cache's buffers grow earlier: if the buffers of all layers grew in one step, that step
        would take long for all rows."""
        self.shapes = EXACT

    def begin(self, region: Region) -> None:
        """Set the slots of the next forward pass."""
        self._region, self._updated = region, False

    def finish(self) -> None:
        """Drop all views after the pass is built, or the next write would have to copy the buffer."""
        self._region = None

    @property
    def region(self) -> Region:
        assert self._region is not None, "the cache is used outside of a forward pass"
        return self._region

    @property
    def offset(self) -> mx.array | int:
        if self._traits.counts_from_zero:
            return 0
        return self.region.after if self._updated else self.region.offset

    def row(self, slot: int, tokens: int) -> list[mx.array]:
        """(heads, tokens, dim) views of the KV of a row of `tokens` tokens in each buffer, in the buffer's order."""
        return [buffer[slot, :, : self._used_tokens(tokens)] for buffer in self.buffers]

    def put_row(self, slot: int, parts: Sequence[mx.array]) -> None:
        """Overwrite a slot with the arrays that `row` returned."""
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[slot, :, : part.shape[1]] = part

    def state(self) -> list[mx.array]:
        """Return the buffers, each with a slot for every row."""
        return self.buffers

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def clear(self) -> None:
        self.buffers = []
        self.slots = 0

    def hold(self, slots: int) -> None:
        """Make room for `slots` slots, in present and future buffers. Rows without KV are moved like others, and MLX does not
        check an index beyond a buffer's end but reads or writes other memory."""
        self.slots = slots
        self.buffers = [_grown(buffer, slots, buffer.shape[2], buffer) for buffer in self.buffers]

    def fit(self, slots: int, tokens: int, *, exactly: bool = False) -> None:
        """Shrink buffers that are four times too large, or with `exactly` all that are too large, after a burst of rows or one
        long row has finished."""
        self.slots = slots
        tokens = self._capacity(tokens)
        if exactly:
            self.buffers = [_cut(buffer, slots, tokens) for buffer in self.buffers]
        else:
            self.buffers = [self._fitted(buffer, slots, tokens) for buffer in self.buffers]

    def _fitted(self, buffer: mx.array, slots: int, tokens: int) -> mx.array:
        keep_slots = 2 * slots if buffer.shape[0] > max(4 * slots, 8) else buffer.shape[0]
        keep_tokens = tokens if buffer.shape[2] > 4 * tokens else buffer.shape[2]
        return _cut(buffer, keep_slots, keep_tokens)

    def _capacity(self, tokens: int) -> int:
        return self.shapes.capacity(tokens + self.phase) - self.phase

    def _used_tokens(self, tokens: int) -> int:
        """Number of positions of its slot that a row of `tokens` tokens uses."""
        return tokens

    def _reserve(self, parts: Sequence[mx.array], slots: int, tokens: int) -> None:
        """Make room for `slots` slots of `tokens` tokens. `parts`, (rows, heads, any, dim) each, give heads, dim and dtype."""
        slots = max(self.slots, slots)
        if self.buffers and self.buffers[0].shape[0] >= slots and self.buffers[0].shape[2] >= tokens:
            return  # The usual case, in nearly every pass of every layer.
        capacity = self._capacity(tokens)
        buffers: Iterable[mx.array | None] = self.buffers or [None] * len(parts)
        self.buffers = [_grown(buffer, slots, capacity, part) for buffer, part in zip(buffers, parts, strict=True)]

    def _scatter(self, parts: Sequence[mx.array], ring: int = 0) -> None:
        """Write each row's tokens at the row's length. Parts (n, heads, width, any dim).

        The write uses one index over a flat view. `buffer[slots, :, positions] = part` is equivalent, with eight more
        operations for each buffer, three of them conversions of the indices; while a GPU decodes, launching operations
        is the bottleneck."""
        for number, part in enumerate(parts):
            shape = self.buffers[number].shape[:3]
            flat = mx.flatten(self.buffers[number], 0, 2)
            flat[self.region.flat_indices(shape[1], shape[2], ring)] = mx.flatten(part, 0, 2)
            self.buffers[number] = mx.unflatten(flat, 0, shape)

    def _shape_mask(self, mask: mx.array) -> mx.array:
        """Reshape a mask (n, queries, keys) bool to the rank that the model's attention broadcasts."""
        return mask.reshape(mask.shape[0], *([1] * (self._traits.mask_rank - 3)), *mask.shape[1:])


def _cut(buffer: mx.array, slots: int, tokens: int) -> mx.array:
    """Shrink a buffer to at most `slots` slots and `tokens` tokens."""
    if buffer.shape[0] <= slots and buffer.shape[2] <= tokens:
        return buffer
    return mx.contiguous(buffer[:slots, :, :tokens])


def _grown(buffer: mx.array | None, slots: int, tokens: int, like: mx.array) -> mx.array:
    """Grow a buffer to at least `slots` slots and `tokens` tokens. Slots double (by at most 16), so that a growing batch copies
    each row a few times at most."""
    if buffer is not None and buffer.shape[0] >= slots and buffer.shape[2] >= tokens:
        return buffer
    have = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
    capacity = have[0] if have[0] >= slots else max(slots, min(2 * have[0], have[0] + 16))
    new = mx.zeros((capacity, like.shape[1], max(have[1], tokens), like.shape[3]), like.dtype)
    if buffer is not None:
        new[: have[0], :, : have[1]] = buffer
    return new


class FullSlots(SlotCache):
    """Slots for attention over all tokens: the counterpart of mlx-lm's KVCache."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (n, heads, width, dim); return (n, heads, keys, dim). The mask hides keys that are not the row's own."""
        self._put([keys, values])
        return self.keys_and_values()

    def _put(self, parts: Sequence[mx.array]) -> None:
        """Write the pass's tokens into the buffers. Each part (n, heads, width, any dim)."""
        region = self.region
        self._reserve(parts, region.stop, region.longest)
        if region.level:
            first = int(region.lengths[0])
            for buffer, part in zip(self.buffers, parts, strict=True):
                buffer[region.start : region.stop, :, first : first + region.width] = part
        else:
            self._scatter(parts)
        self._updated = True

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        keys, values = self._of_region()
        return keys, values

    def _of_region(self) -> list[mx.array]:
        rows, tokens = slice(self.region.start, self.region.stop), slice(0, self.region.keys)
        return [buffer[rows, :, tokens] for buffer in self.buffers]

    def read(self, slot: int, start: int, stop: int) -> list[mx.array]:
        """(heads, stop - start, dim) views of each buffer. The caller copies them, and starts the copies, before a buffer changes."""
        return [buffer[slot, :, start:stop] for buffer in self.buffers]

    def write(self, slot: int, start: int, parts: Sequence[mx.array], room: int = 0) -> None:
        """Write tokens from `start` on, in the form that `read` returns, of a row that will have `room` tokens."""
        stop = start + parts[0].shape[1]
        self._reserve([part[None] for part in parts], slot + 1, max(stop, room))
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[slot, :, start:stop] = part

    def begin_with(self, parts: Sequence[Sequence[mx.array]], room: int) -> None:
        """Make the buffers for one slot from its row's first tokens: for each buffer consecutive pieces (heads, any, dim).
        This takes one copy, where making buffers and writing into them take three."""
        assert not self.buffers and self.slots == 1, "somebody's KV would be lost"
        capacity = self._capacity(room)
        for pieces in parts:
            heads, _, dim = pieces[0].shape
            padding = capacity - sum(piece.shape[1] for piece in pieces)
            end = [mx.zeros((heads, padding, dim), pieces[0].dtype)] if padding else []
            self.buffers.append(mx.concatenate([*pieces, *end], 1)[None])

    def make_mask(self, width: int, return_array: bool = False, window_size: int | None = None) -> Any:
        region = self.region
        windowed = window_size is not None and region.longest > window_size
        if region.causal and not windowed and (width == 1 or not return_array):
            return None if width == 1 else "causal"
        query = region.positions[:, :, None]
        key = mx.arange(region.keys, dtype=mx.int32)
        mask = key <= query
        if window_size is not None and windowed:
            mask = mask & (key > query - window_size)
        return self._shape_mask(mask)


class OpenSlots(FullSlots):
    """Slots for models that write into their caches: `keys` and `values` are the buffers.

    Such models assign for two reasons. An indexer's values are never read, so the model sets them to zeros; and a buffer
    that nothing reads in a pass becomes a dependency of one that is read, so that it is evaluated, too. Only the second
    assignment has an effect here.
    """

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
        """Ignore the assignment: the values given to `update_and_fetch` are kept."""


class RingSlots(SlotCache):
    """Slots for attention over the last `window` tokens: the counterpart of mlx-lm's RotatingKVCache.

    The token at position p is stored at index p % ring. One more index behind the ring takes tokens that are not kept.

    `slack` is the number of tokens that the ring holds beyond the window. A pass of at most slack + 1 tokens a row
    overwrites no key that its first token attends to, so all its tokens are written first. Rejecting draft tokens
    afterwards leaves the window of the row's last tokens intact: the drafts overwrote tokens that no window reaches
    any more.
    """

    def __init__(self, window: int, slack: int = 0, traits: Traits = USUAL) -> None:
        super().__init__(traits)
        self.window = window
        self.ring = window + slack
        self._fetched: tuple[mx.array, mx.array] | None = None

    def finish(self) -> None:
        super().finish()
        self._fetched = None

    def _capacity(self, tokens: int) -> int:  # noqa: ARG002  A ring has a fixed length.
        return self.ring + 1

    def _used_tokens(self, tokens: int) -> int:
        return min(tokens, self.ring)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the pass's tokens. Returns the ring after the write if the pass has few tokens, else the ring before the write
        followed by the new tokens."""
        region, parts = self.region, (keys, values)
        self._reserve(parts, region.stop, 0)
        if not self._fits:
            before_keys, before_values = self._ring_contents()
            self._fetched = mx.concatenate([before_keys, keys], 2), mx.concatenate([before_values, values], 2)
        self._scatter(parts, self.ring)
        self._updated = True
        return self.keys_and_values()

    @property
    def _fits(self) -> bool:
        """Whether the pass's tokens can be written before any of them attends to the ring."""
        return self.region.width <= 1 + self.ring - self.window

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self._fetched or self._ring_contents()

    def snapshot(self, slot: int, length: int) -> list[mx.array]:
        """Copy (last min(length, window) tokens, heads, dim) of each buffer, oldest first. Fewer than `slack` tokens after
        `length` may have been written since."""
        indices = self._ring_indices(length)
        return [buffer[mx.full(indices.shape, slot), :, indices] for buffer in self.buffers]

    def restore(self, slot: int, length: int, parts: Sequence[mx.array]) -> None:
        """Write the snapshot of a row of `length` tokens."""
        indices = self._ring_indices(length)
        self._reserve([part.transpose(1, 0, 2)[None] for part in parts], slot + 1, 0)
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[mx.full(indices.shape, slot), :, indices] = part

    def _ring_indices(self, length: int) -> mx.array:
        """(kept,) int32: ring indices of the newest tokens of a row."""
        return mx.array((np.arange(max(length - self.window, 0), length) % self.ring).astype(np.int32))

    def _ring_tokens(self) -> int:
        """Number of ring indices that any row of the region may use."""
        return min(self.ring, self.region.longest - (0 if self._fits else self.region.width))

    def _ring_contents(self) -> tuple[mx.array, mx.array]:
        rows, tokens = slice(self.region.start, self.region.stop), slice(0, self._ring_tokens())
        keys, values = (buffer[rows, :, tokens] for buffer in self.buffers)
        return keys, values

    def make_mask(
        self,
        width: int,  # noqa: ARG002  The region has the width.
        return_array: bool = False,  # noqa: ARG002  The mask is always an array.
        window_size: int | None = None,
    ) -> mx.array:
        window, index = window_size or self.window, mx.arange(self._ring_tokens(), dtype=mx.int32)
        first = self._first_visible(window)
        if self._fits:
            query, last = self.region.clamped_positions[:, :, None], self.region.last[:, None, None]
            position = last - (last - index) % self.ring
            return self._shape_mask((position >= first(query)) & (position <= query))
        query, last = self.region.positions[:, :, None], self.region.offset[:, None, None] - 1
        position = last - (last - index) % self.ring
        key = self.region.positions[:, None, :]
        before, new = position >= first(query), (key <= query) & (key >= first(query))
        return self._shape_mask(mx.concatenate([before, new], axis=-1))

    def _first_visible(self, window: int) -> Callable[[mx.array], mx.array]:
        """Function from a query's position to the position of the first key that it attends to.

        mlx-lm keeps `window` tokens when a pass begins, so the pass's first token attends to these and itself at most; with
        a wider mask, later tokens attend to more. Each draft token attends as if it were fed alone.
        """
        if window <= self.window or not self._traits.wide_masks or self.region.singly:
            window = min(window, self.window)
            return lambda query: mx.maximum(query - (window - 1), 0)
        kept = mx.maximum(self.region.offset[:, None, None] - (self.window - 1), 0)
        return lambda query: mx.maximum(query - (window - 1), kept)
