"""KV of a bank's rows in buffers of each layer: each row has a slot, left-aligned, with its own
length.

mlx-lm's batch caches pad on the left: a row that joins, leaves or rejects draft tokens makes them
copy the KV of all rows. Here a row's tokens begin at 0 of its slot, so joining writes into one
slot, leaving moves a decoding row and a prefilling one at most, and rejecting tokens decreases a
length. The interface towards the models is mlx-lm's.

One forward pass reads a contiguous range of slots: a `Region`. Buffers: (slots, heads, tokens,
dim).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from trouper.engine.adaptations.cache_traits import USUAL, Traits
from trouper.engine.kv.buffer_shapes import NO_ROOM, Room, ShapeChanges
from trouper.engine.kv.pass_shapes import EXACT
from trouper.engine.kv.region import Region

SPARE_TOKENS = 8192
"""Maximum number of tokens in slots beyond those that are needed. For long rows the copies cost
less than such memory."""


class SlotCache:
    """Base of every layer's cache: the region of the pass, and buffers that grow."""

    def __init__(self, traits: Traits = USUAL) -> None:
        self.changes = ShapeChanges()
        self._buffers: list[mx.array] = []
        self._region: Region | None = None
        self._updated = False
        self.traits = traits
        self.slots = 0
        """Number of rows, with or without KV: buffers have a slot for each."""
        self.phase = 0
        """Number of tokens by which this cache's buffers are shorter than others', so that they
        grow earlier: if the buffers of all layers grew in one step, that step would take long for
        all rows."""
        self.lead = 0
        """Number of free positions with which buffers grow, where those of all layers have the same
        lengths. `phase` or this is 0."""
        self.shapes = EXACT
        self.spares = True
        """Whether buffers grow by more slots than are needed."""
        self.expected_tokens = 0
        """Number of tokens of the longest row when its prompt is complete: buffers that grow with
        each chunk of a long prompt would be copied as often."""

    @property
    def buffers(self) -> list[mx.array]:
        """Keys and values, each with a slot for every row; quantized, up to three buffers for each.
        Empty before the first write. An array may be replaced by one of the same shape; for other
        shapes the list is set."""
        return self._buffers

    @buffers.setter
    def buffers(self, buffers: list[mx.array]) -> None:
        self._buffers = buffers
        self.changes.count += 1

    def begin(self, region: Region) -> None:
        """Set the slots of the next forward pass."""
        self._region, self._updated = region, False

    def finish(self) -> None:
        """Drop all views after the pass is built, or the next write would have to copy the
        buffer."""
        self._region = None

    @property
    def region(self) -> Region:
        """The slots of the current pass."""
        assert self._region is not None, "the cache is used outside of a forward pass"
        return self._region

    @property
    def offset(self) -> mx.array | int:
        """Rope offset of each row, (n,) int32, as mlx-lm's models read it: before
        `update_and_fetch` of the position of the first new token, after it behind the last one."""
        if self.traits.counts_from_zero:
            return 0
        return self.region.after if self._updated else self.region.offset

    def row(self, slot: int, tokens: int) -> list[mx.array]:
        """(heads, tokens, dim) views of the KV of a row of `tokens` tokens in each buffer, in the
        buffer's order."""
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
        """Free the buffers, after the last row has left."""
        self.buffers = []
        self.slots = self.expected_tokens = 0

    def clean(self) -> None:
        """Set to 0 what is no finite number, in one buffer after another: each is copied."""
        for number, buffer in enumerate(self.buffers):
            if mx.issubdtype(buffer.dtype, mx.floating):
                self.buffers[number] = mx.where(
                    mx.isfinite(buffer), buffer, mx.zeros((), buffer.dtype)
                )
                mx.eval(self.buffers[number])

    def hold(self, slots: int) -> None:
        """Make room for `slots` slots, in present and future buffers. Rows without KV are moved
        like others, and MLX does not check an index beyond a buffer's end but reads or writes other
        memory."""
        self.slots = slots
        self.buffers = [
            _grown(buffer, slots, buffer.shape[2], buffer, spares=self.spares)
            for buffer in self.buffers
        ]

    def fit(self, slots: int, tokens: int, *, exactly: bool = False) -> None:
        """Shrink buffers that are four times too large, or with `exactly` all that are too large,
        after a burst of rows or one long row has finished."""
        self.slots, self.expected_tokens = slots, 0
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
        return self.shapes.capacity(tokens + self.phase + self.lead) - self.phase

    def capacity_for(self, tokens: int) -> int:
        """Number of positions of buffers that are made for `tokens` tokens."""
        return self._capacity(max(tokens, self.expected_tokens))

    def _used_tokens(self, tokens: int) -> int:
        """Number of positions of its slot that a row of `tokens` tokens uses."""
        return tokens

    @property
    def room(self) -> Room:
        """What buffers have room for; none if they do not hold all slots."""
        if not self._buffers:
            return NO_ROOM
        held, _, capacity, _ = self._buffers[0].shape
        return (held, capacity - self.lead) if held >= self.slots else NO_ROOM

    def reserve(self, parts: Sequence[mx.array], slots: int, tokens: int) -> None:
        """Make room for `slots` slots of `tokens` tokens. `parts`, (rows, heads, any, dim) each,
        give heads, dim and dtype."""
        slots = max(self.slots, slots)
        held, free = self.room
        if slots <= held and tokens <= free:
            return  # The usual case, in nearly every pass of every layer.
        capacity = self.capacity_for(tokens)
        buffers: Iterable[mx.array | None] = self.buffers or [None] * len(parts)
        self.buffers = [
            _grown(buffer, slots, capacity, part, spares=self.spares)
            for buffer, part in zip(buffers, parts, strict=True)
        ]

    def _scatter(self, parts: Sequence[mx.array], ring: int = 0) -> None:
        """Write each row's tokens at the row's length. Parts (n, heads, width, any dim).

        The write uses one index over a flat view. `buffer[slots, :, positions] = part` is
        equivalent, with eight more operations for each buffer, three of them conversions of the
        indices; while a GPU decodes, launching operations is the bottleneck."""
        for number, part in enumerate(parts):
            shape = self.buffers[number].shape[:3]
            flat = mx.flatten(self.buffers[number], 0, 2)
            flat[self.region.flat_indices(shape[1], shape[2], ring)] = mx.flatten(part, 0, 2)
            self.buffers[number] = mx.unflatten(flat, 0, shape)

    def _shape_mask(self, mask: mx.array) -> mx.array:
        """Reshape a mask (n, queries, keys) bool to the rank that the model's attention
        broadcasts."""
        return mask.reshape(mask.shape[0], *([1] * (self.traits.mask_rank - 3)), *mask.shape[1:])


def _cut(buffer: mx.array, slots: int, tokens: int) -> mx.array:
    """Shrink a buffer to at most `slots` slots and `tokens` tokens."""
    if buffer.shape[0] <= slots and buffer.shape[2] <= tokens:
        return buffer
    return mx.contiguous(buffer[:slots, :, :tokens])


def _grown(
    buffer: mx.array | None, slots: int, tokens: int, like: mx.array, *, spares: bool
) -> mx.array:
    """Grow a buffer to at least `slots` slots and `tokens` tokens. With `spares` slots double, by
    at most 16 and `SPARE_TOKENS`, so that a growing batch of short rows copies each a few times at
    most."""
    if buffer is not None and buffer.shape[0] >= slots and buffer.shape[2] >= tokens:
        return buffer
    have = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
    spare = min(have[0], 16, SPARE_TOKENS // max(tokens, 1)) if spares else 0
    capacity = have[0] if have[0] >= slots else max(slots, have[0] + spare)
    new = mx.zeros((capacity, like.shape[1], max(have[1], tokens), like.shape[3]), like.dtype)
    if buffer is not None:
        new[: have[0], :, : have[1]] = buffer
    return new
