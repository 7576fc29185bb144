"""KV of many rows in one buffer a layer: a slot for each row, left-aligned, with its own length.

mlx-lm's batch caches pad on the left: a row that joins, leaves or takes tokens back copies everybody's
KV. Here a row's tokens begin at 0 of its slot, so joining is writing into one slot, leaving is moving
one row, and taking back is a smaller length. The interface towards the models is mlx-lm's.

One forward pass sees a contiguous range of slots: a `Region`. Buffers: (slots, heads, tokens, dim).
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
    """What every layer's cache shares: the region of the pass, and buffers that grow."""

    def __init__(self, traits: Traits = USUAL) -> None:
        self.buffers: list[mx.array] = []
        """Keys and values, once there are any; each with a slot for every row."""
        self._region: Region | None = None
        self._updated = False
        self._traits = traits
        self.slots = 0
        """Rows that there are, with KV or still without: buffers have a slot for each."""
        self.phase = 0
        """So many tokens earlier its buffers grow: if those of all layers grew in one step, everybody would wait for it."""
        self.shapes = EXACT

    def begin(self, region: Region) -> None:
        """The next forward pass is about these slots."""
        self._region, self._updated = region, False

    def finish(self) -> None:
        """The pass is built: keep no view, or the next write would have to copy the buffer."""
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
        """(heads, tokens, dim) views of what a row of so many tokens has in each buffer, in the buffer's order."""
        return [buffer[slot, :, : self._used_tokens(tokens)] for buffer in self.buffers]

    def put_row(self, slot: int, parts: Sequence[mx.array]) -> None:
        """Copies of what `row` gave, into another slot; what was there is gone."""
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[slot, :, : part.shape[1]] = part

    def state(self) -> list[mx.array]:
        """The buffers, each with a slot for every row."""
        return self.buffers

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def clear(self) -> None:
        self.buffers = []
        self.slots = 0

    def hold(self, slots: int) -> None:
        """Make room for so many slots, now and whenever buffers are made: rows without KV are moved like others, and an
        index beyond a buffer's end is not an error in MLX but somebody else's memory."""
        self.slots = slots
        self.buffers = [_grown(buffer, slots, buffer.shape[2], buffer) for buffer in self.buffers]

    def fit(self, slots: int, tokens: int, *, exactly: bool = False) -> None:
        """Give back what is four times too large, or `exactly` all that is too large: a burst of rows or one long row has
        left."""
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
        """How many places of its slot a row of so many tokens uses."""
        return tokens

    def _reserve(self, parts: Sequence[mx.array], slots: int, tokens: int) -> None:
        """Room for so many slots and tokens of what `parts` are, (rows, heads, any, dim) each."""
        slots = max(self.slots, slots)
        if self.buffers and self.buffers[0].shape[0] >= slots and self.buffers[0].shape[2] >= tokens:
            return  # In nearly every pass of every layer.
        capacity = self._capacity(tokens)
        buffers: Iterable[mx.array | None] = self.buffers or [None] * len(parts)
        self.buffers = [_grown(buffer, slots, capacity, part) for buffer, part in zip(buffers, parts, strict=True)]

    def _scatter(self, parts: Sequence[mx.array], ring: int = 0) -> None:
        """Each row's tokens to where it stands. Parts (n, heads, width, any dim).

        By one index over a flat view: `buffer[slots, :, positions] = part` says the same with eight operations more for each
        buffer, three of them conversions of the indices, and a GPU that decodes waits for whoever launches operations."""
        for number, part in enumerate(parts):
            shape = self.buffers[number].shape[:3]
            flat = mx.flatten(self.buffers[number], 0, 2)
            flat[self.region.flat_indices(shape[1], shape[2], ring)] = mx.flatten(part, 0, 2)
            self.buffers[number] = mx.unflatten(flat, 0, shape)

    def _shape_mask(self, mask: mx.array) -> mx.array:
        """(n, queries, keys) bool to the rank that the model's attention broadcasts."""
        return mask.reshape(mask.shape[0], *([1] * (self._traits.mask_rank - 3)), *mask.shape[1:])


def _cut(buffer: mx.array, slots: int, tokens: int) -> mx.array:
    """At most so many slots and tokens."""
    if buffer.shape[0] <= slots and buffer.shape[2] <= tokens:
        return buffer
    return mx.contiguous(buffer[:slots, :, :tokens])


def _grown(buffer: mx.array | None, slots: int, tokens: int, like: mx.array) -> mx.array:
    """At least so many slots and tokens; slots double, so that a growing batch copies each row a few times at most."""
    if buffer is not None and buffer.shape[0] >= slots and buffer.shape[2] >= tokens:
        return buffer
    have = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
    capacity = have[0] if have[0] >= slots else max(slots, min(2 * have[0], have[0] + 16))
    new = mx.zeros((capacity, like.shape[1], max(have[1], tokens), like.shape[3]), like.dtype)
    if buffer is not None:
        new[: have[0], :, : have[1]] = buffer
    return new


class FullSlots(SlotCache):
    """Attention over everything: the counterpart of mlx-lm's KVCache."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """(n, heads, width, dim) in; (n, heads, keys, dim) out, of which the mask hides what is not a row's own."""
        self._put([keys, values])
        return self.keys_and_values()

    def _put(self, parts: Sequence[mx.array]) -> None:
        """The pass's tokens into the buffers. Each part (n, heads, width, any dim)."""
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
        """(heads, stop - start, dim) views of each buffer: to be copied, and started, before a buffer changes."""
        return [buffer[slot, :, start:stop] for buffer in self.buffers]

    def write(self, slot: int, start: int, parts: Sequence[mx.array], room: int = 0) -> None:
        """Tokens from `start` on, in the form that `read` gives, of a row that will have `room` of them."""
        stop = start + parts[0].shape[1]
        self._reserve([part[None] for part in parts], slot + 1, max(stop, room))
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[slot, :, start:stop] = part

    def begin_with(self, parts: Sequence[Sequence[mx.array]], room: int) -> None:
        """Buffers for one slot, made of what its row begins with: for each buffer pieces (heads, any, dim), one after
        another. One copy, where making buffers and writing into them are three."""
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
    """For models that write into their caches: `keys` and `values` are the buffers.

    They assign for two reasons. What an indexer keeps as values is never read, so it puts zeros there; and a buffer that
    nothing reads in a pass is made a condition of one that is, so that it is computed, too. The second is done.
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
        """What `update_and_fetch` was given stays."""


class RingSlots(SlotCache):
    """Attention over the last `window` tokens: the counterpart of mlx-lm's RotatingKVCache.

    The token at position p lies at p % ring. One place more than the ring takes what need not be kept.

    `slack` is what the ring holds beyond the window. A pass of at most slack + 1 tokens a row overwrites nothing that its
    first token sees, so all are written first. And what is taken back afterwards leaves the window of the row's last
    tokens whole: the places that were written too far hold tokens that no window reaches any more.
    """

    def __init__(self, window: int, slack: int = 0, traits: Traits = USUAL) -> None:
        super().__init__(traits)
        self.window = window
        self.ring = window + slack
        self._fetched: tuple[mx.array, mx.array] | None = None

    def finish(self) -> None:
        super().finish()
        self._fetched = None

    def _capacity(self, tokens: int) -> int:  # noqa: ARG002  A ring is as long as it is.
        return self.ring + 1

    def _used_tokens(self, tokens: int) -> int:
        return min(tokens, self.ring)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Few tokens: the ring after they were written. More: what the ring held before, then the new tokens."""
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
        """Whether the pass's tokens can be written before any of them looks at the ring."""
        return self.region.width <= 1 + self.ring - self.window

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self._fetched or self._ring_contents()

    def snapshot(self, slot: int, length: int) -> list[mx.array]:
        """(last min(length, window) tokens, heads, dim) of each buffer, oldest first, in memory of its own. Less than
        `slack` tokens after `length` may have been written meanwhile."""
        indices = self._ring_indices(length)
        return [buffer[mx.full(indices.shape, slot), :, indices] for buffer in self.buffers]

    def restore(self, slot: int, length: int, parts: Sequence[mx.array]) -> None:
        """What `snapshot` gave of a row of so many tokens."""
        indices = self._ring_indices(length)
        self._reserve([part.transpose(1, 0, 2)[None] for part in parts], slot + 1, 0)
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[mx.full(indices.shape, slot), :, indices] = part

    def _ring_indices(self, length: int) -> mx.array:
        """(kept,) int32: where the newest tokens of a row lie."""
        return mx.array((np.arange(max(length - self.window, 0), length) % self.ring).astype(np.int32))

    def _ring_tokens(self) -> int:
        """How much of the ring any row of the region may use."""
        return min(self.ring, self.region.longest - (0 if self._fits else self.region.width))

    def _ring_contents(self) -> tuple[mx.array, mx.array]:
        rows, tokens = slice(self.region.start, self.region.stop), slice(0, self._ring_tokens())
        keys, values = (buffer[rows, :, tokens] for buffer in self.buffers)
        return keys, values

    def make_mask(
        self,
        width: int,  # noqa: ARG002  The region knows.
        return_array: bool = False,  # noqa: ARG002  It always is one.
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
        """From a query's position to that of the first key that it sees.

        mlx-lm keeps `window` tokens when a pass begins, so its first token sees no more than these and itself; if the mask
        is wider than that, the tokens after it do. Drafts are as if each were fed alone.
        """
        if window <= self.window or not self._traits.wide_masks or self.region.singly:
            window = min(window, self.window)
            return lambda query: mx.maximum(query - (window - 1), 0)
        kept = mx.maximum(self.region.offset[:, None, None] - (self.window - 1), 0)
        return lambda query: mx.maximum(query - (window - 1), kept)
