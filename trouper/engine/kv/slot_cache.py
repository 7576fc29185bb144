"""KV of a bank's rows in buffers of each layer: left-aligned slots with a length each."""

# mlx-lm's batch caches pad on the left, hence joining, leaving or rejecting drafts copies the KV of
# all rows. Here joining writes one slot, leaving moves at most two rows, and rejecting decreases a
# length. The models' interface is mlx-lm's. A pass reads contiguous slots: a `Region`. Buffers:
# (slots, heads, tokens, dim).

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import mlx.core as mx

from trouper.engine.adaptations.row_offsets import USUAL, Traits
from trouper.engine.kv.whole_buffer import WholeBuffer
from trouper.engine.passes.pass_shapes import EXACT
from trouper.engine.passes.region import Region

# Maximum tokens in spare slots. For long rows copies cost less than memory.
SPARE_TOKENS = 8192
Room = tuple[int, int]
"""Slots, and tokens in each, that buffers have room for."""
NO_ROOM: Room = (0, 0)


class ShapeChanges:
    """Number of changes of buffers, shared by the caches of a bank."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class PassOffsets:
    """The offsets of a layer in a pass."""

    traits: Traits
    _region: Region | None = None
    _updated = False

    @property
    def region(self) -> Region:
        assert self._region is not None, "the cache is used outside of a forward pass"
        return self._region

    @property
    def offset(self) -> mx.array | int:
        """Rope offset of each row, (n,) int32, as mlx-lm's models read: the first new token's
        position before `update_and_fetch`, behind the last one afterwards."""
        if self.traits.counts_from_zero:
            return 0
        return self.region.after if self._updated else self.region.offset

    @property
    def _offset(self) -> int:
        """The longest row's tokens before the pass, which mlx-vlm's models read here
        (`cache_position_offset`): of `offset` they would wait for the device in each pass."""
        return self.region.longest - self.region.width


class SlotCache(PassOffsets):
    """Base of every layer's cache: the pass's region, and growing buffers."""

    def __init__(self, traits: Traits = USUAL) -> None:
        self.changes = ShapeChanges()
        self._buffers: list[mx.array] = []
        self.traits = traits
        self.slots = 0
        """With or without KV: each row has a slot."""
        self.phase = 0
        """Tokens by which buffers are shorter than others', since growth of all layers in one step
        would take long."""
        self.lead = 0
        """Free positions at growth. `phase` or `lead` is 0."""
        self.shapes = EXACT
        self.spares = True
        self.expected_tokens = 0
        """Tokens of the longest row with a complete prompt, to grow once."""

    @property
    def buffers(self) -> list[mx.array]:
        """Keys and values, each with a slot for every row; quantized, up to three buffers each.
        Empty before the first write. An array may be replaced by one of the same shape; other
        shapes need a new list."""
        return self._buffers

    @buffers.setter
    def buffers(self, buffers: list[mx.array]) -> None:
        self._buffers = buffers
        self.changes.count += 1

    def begin(self, region: Region) -> None:
        self._region, self._updated = region, False

    def finish(self) -> None:
        """Drop all views after the pass is built: the next write would copy the buffer."""
        self._region = None

    def row(self, slot: int, tokens: int) -> list[mx.array]:
        """(heads, tokens, dim) views of a row in each buffer, in buffer order."""
        return [buffer[slot, :, : self._used_tokens(tokens)] for buffer in self.buffers]

    def put_row(self, slot: int, parts: Sequence[mx.array]) -> None:
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[slot, :, : part.shape[1]] = part

    def state(self) -> list[mx.array]:
        return self.buffers

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def clear(self) -> None:
        self.buffers = []
        self.slots = self.expected_tokens = 0

    def clean(self) -> None:
        """Set numbers that are not finite to 0, buffer by buffer: each is copied."""
        for number, buffer in enumerate(self.buffers):
            if mx.issubdtype(buffer.dtype, mx.floating):
                self.buffers[number] = mx.where(
                    mx.isfinite(buffer), buffer, mx.zeros((), buffer.dtype)
                )
                mx.eval(self.buffers[number])

    def hold(self, slots: int) -> None:
        """Make room for `slots` slots in present and future buffers."""
        # Rows without KV are moved, too, and MLX does not check indices beyond a buffer's end.
        self.slots = slots
        self.buffers = [
            _grown(buffer, slots, buffer.shape[2], buffer, spares=self.spares)
            for buffer in self.buffers
        ]

    def fit(self, slots: int, tokens: int, *, exactly: bool = False) -> None:
        """Shrink buffers that are four times too large, or with `exactly` at all too large."""
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
        """Positions of buffers made for `tokens` tokens."""
        return self._capacity(max(tokens, self.expected_tokens))

    def _used_tokens(self, tokens: int) -> int:
        # Positions that a row of `tokens` tokens uses.
        return tokens

    @property
    def room(self) -> Room:
        """Room of the buffers; none unless all slots fit."""
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
        # Write each row's tokens at the row's length. Parts (n, heads, width, any dim). One index
        # over a flat view spares eight operations a buffer against `buffer[slots, :, positions] =
        # part`; launches are the bottleneck while a GPU decodes.
        for number, part in enumerate(parts):
            if not part.shape[-1]:
                continue  # An indexer has keys alone, and MLX's CPU would divide by the width.
            shape = self.buffers[number].shape[:3]
            flat = mx.flatten(self.buffers[number], 0, 2)
            flat[self.region.flat_indices(shape[1], shape[2], ring)] = mx.flatten(part, 0, 2)
            self.buffers[number] = mx.unflatten(flat, 0, shape)

    def _needs_array(self, width: int, return_array: bool) -> bool:
        # Whether the model gets an array as mask. Then it may compute with the mask and with keys.
        needs = return_array and width > 1
        if needs:
            self.region.tiled = False
        return needs

    # -- attention -------------------------------------------------------------------------------

    window = 0
    """Maximum of attended keys; 0: all."""
    ring = 0
    """Length of the ring in buffers; 0: none."""

    @property
    def _for_kernel(self) -> bool:
        # Whether attention gets whole buffers.
        raise NotImplementedError

    def _rows_of(self, buffer: mx.array) -> mx.array:
        # (n, heads, keys, dim) of the pass's rows.
        raise NotImplementedError

    def _mask(self) -> mx.array | str:
        # As `make_mask` without kernels.
        raise NotImplementedError

    def _for_attention(
        self, keys: mx.array, values: mx.array, *, gathered: bool = False
    ) -> tuple[Any, Any]:
        # Views of the pass's rows in two buffers; for kernels, whole buffers. `gathered`: see
        # `WholeBuffer`.
        def one_side(buffer: mx.array) -> Any:
            view = (lambda: buffer) if gathered else partial(self._rows_of, buffer)
            if not self._for_kernel:
                return view()
            return WholeBuffer(
                buffer,
                self.region,
                view,
                self._mask,
                ring=self.ring,
                window=self.window,
                gathered=gathered,
            )

        return one_side(keys), one_side(values)

    def _shape_mask(self, mask: mx.array) -> mx.array:
        # Reshape a mask (n, queries, keys) bool to the rank that attention broadcasts.
        return mask.reshape(mask.shape[0], *([1] * (self.traits.mask_rank - 3)), *mask.shape[1:])


def _cut(buffer: mx.array, slots: int, tokens: int) -> mx.array:
    # Shrink a buffer to at most `slots` slots and `tokens` tokens.
    if buffer.shape[0] <= slots and buffer.shape[2] <= tokens:
        return buffer
    return mx.contiguous(buffer[:slots, :, :tokens])


def _grown(
    buffer: mx.array | None, slots: int, tokens: int, like: mx.array, *, spares: bool
) -> mx.array:
    # Grow a buffer to at least `slots` slots and `tokens` tokens. With `spares` slots double, by at
    # most 16 and `SPARE_TOKENS`, for few copies in a growing batch.
    if buffer is not None and buffer.shape[0] >= slots and buffer.shape[2] >= tokens:
        return buffer
    have = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
    spare = min(have[0], 16, SPARE_TOKENS // max(tokens, 1)) if spares else 0
    capacity = have[0] if have[0] >= slots else max(slots, have[0] + spare)
    new = mx.zeros((capacity, like.shape[1], max(have[1], tokens), like.shape[3]), like.dtype)
    if buffer is not None:
        new[: have[0], :, : have[1]] = buffer
    return new


# Each decode pass needs the shapes, and asking 28 layers was two fifths of a one-row step's Python.
# Passes write arrays of the same shapes: only setting `SlotCache.buffers` counts as a change.


@attrs.frozen(cache_hash=True)
class HeldShapes:
    """Shapes of a bank's buffers. Hashed once, as part of a key of each step."""

    shapes: tuple[tuple[int, ...], ...]
    room: Room = attrs.field(eq=False)
    """The minimum over all caches."""

    def has_room(self, slots: int, tokens: int) -> bool:
        return slots <= self.room[0] and tokens <= self.room[1]


class BankCaches:
    """The caches of a bank for one model, and their shapes."""

    def __init__(self, leaves: Sequence[SlotCache], changes: ShapeChanges) -> None:
        """`changes`: the shared count of these caches."""
        self.leaves, self._changes = leaves, changes
        self._seen = -1
        self._held = HeldShapes((), NO_ROOM)

    def held(self) -> HeldShapes:
        if self._seen != self._changes.count:
            shapes = tuple(tuple(buffer.shape) for leaf in self.leaves for buffer in leaf.buffers)
            slots, tokens = (
                zip(*(leaf.room for leaf in self.leaves), strict=True)
                if self.leaves
                else ((0,), (0,))
            )
            self._held = HeldShapes(shapes, (min(slots), min(tokens)))
            self._seen = self._changes.count
        return self._held
