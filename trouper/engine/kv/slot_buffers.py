"""KV buffers of one bank: the slot caches of all layers, with the same slots."""

# `SlotAssignment` knows the rows of slots, `slot_rows.py` the tokens of passes.

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.kv.full_slots import FullSlots
from trouper.engine.kv.kv_layout import Layout, dealt
from trouper.engine.kv.model_caches import flatten
from trouper.engine.kv.ring_slots import RingSlots
from trouper.engine.kv.slot_cache import BankCaches, ShapeChanges, SlotCache
from trouper.engine.passes.pass_shapes import LEAD, STEP, Shapes
from trouper.engine.passes.region import Ints, Region
from trouper.engine.platform.eager_eval import copied
from trouper.protocol.plans import RowId

Moves = Sequence[tuple[int, int]]
"""(source slot, target slot) of rows whose KV moves, all at once."""


@attrs.frozen
class Rearrangement:
    """New slots of the remaining rows. arranged: the old slot of each new one. num_decoding:
    decoding rows."""

    moves: Moves
    arranged: list[int]
    num_decoding: int


class SlotAssignment:
    """Rows in the slots of one bank: decoding rows in [0, num_decoding), then prefilling rows,
    without a gap."""

    def __init__(self) -> None:
        self.order: list[RowId] = []
        self.lengths: Ints = np.zeros(0, np.int32)
        """(slots,) int32: tokens in each row's KV."""
        self.num_decoding = 0

    def __len__(self) -> int:
        return len(self.order)

    @property
    def decoding(self) -> Sequence[RowId]:
        return self.order[: self.num_decoding]

    @property
    def prefilling(self) -> Sequence[RowId]:
        return self.order[self.num_decoding :]

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    def slot(self, row: RowId) -> int:
        return self.order.index(row)

    def length(self, row: RowId) -> int:
        return int(self.lengths[self.slot(row)])

    def open(self, row: RowId) -> None:
        self.order.append(row)
        self.lengths = np.append(self.lengths, np.int32(0))

    def promote(self, slot: int) -> None:
        """Make the prefilling row of this slot the last decoding row, by an exchange."""
        first = self.num_decoding
        self.order[slot], self.order[first] = self.order[first], self.order[slot]
        self.lengths[[slot, first]] = self.lengths[[first, slot]]
        self.num_decoding += 1

    def without(self, rows: Sequence[RowId]) -> Rearrangement:
        """The slots after these rows have left. Changes nothing."""
        dropped = set(rows)
        kept = [slot for slot, row in enumerate(self.order) if row not in dropped]
        assert len(kept) + len(dropped) == len(self.order), "a row was dropped that is not here"
        decoding = [slot for slot in kept if slot < self.num_decoding]
        moves, arranged = compact(decoding, [slot for slot in kept if slot >= self.num_decoding])
        return Rearrangement(moves, arranged, len(decoding))

    def rearrange(self, change: Rearrangement) -> None:
        self.order = [self.order[slot] for slot in change.arranged]
        self.lengths = self.lengths[change.arranged]
        self.num_decoding = change.num_decoding


def compact(decoding: list[int], prefilling: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Close the gaps in two neighbouring ranges of slots with the fewest moves.

    `decoding`, `prefilling`: surviving slots, ascending. Returns moves (source, target) in an order
    without overwriting, and the old slot of each new one."""
    moves: list[tuple[int, int]] = []
    arranged: list[int] = []
    for kept in (decoding, prefilling):
        start, stop = len(arranged), len(arranged) + len(kept)
        stay = {index for index in kept if start <= index < stop}
        movers = iter(reversed([index for index in kept if index not in stay]))
        for slot in range(start, stop):
            source = slot if slot in stay else next(movers)
            arranged.append(source)
            if source != slot:
                moves.append((source, slot))
    return moves, arranged


ALL = slice(None)


class SlotBuffers:
    def __init__(
        self,
        caches: Sequence[Any],
        layout: Callable[[], Layout],
        shapes: Shapes,
        draft_caches: Sequence[Sequence[Any]] = (),
    ) -> None:
        """`caches`, and `draft_caches` of each drafter: from `slot_caches`. `layout`: computes the
        shapes of blocks and snapshots."""
        self.caches, self.draft_caches, self._layout = caches, draft_caches, layout
        self.own, self._drafts = (
            [leaf for leaf in flatten(layers) if isinstance(leaf, SlotCache)]
            for layers in (caches, [*chain.from_iterable(draft_caches)])
        )
        self.leaves: list[SlotCache] = [*self.own, *self._drafts]
        """Caches in the model's order, without recurrent states."""
        changes = ShapeChanges()
        for cache in self.leaves:
            cache.changes = changes
        self.of_model = BankCaches(self.own, changes)
        self._full = [cache for cache in self.leaves if isinstance(cache, FullSlots)]
        self._rings = [cache for cache in self.leaves if isinstance(cache, RingSlots)]
        for index, cache in enumerate(self._full):
            cache.shapes = shapes
            if shapes.rounded:
                cache.lead = index * LEAD // len(self._full)
            else:
                cache.phase = index * STEP // len(self._full)

    # -- a pass ----------------------------------------------------------------------------------

    def begin(self, region: Region) -> None:
        for cache in self.leaves:
            cache.begin(region)

    def finish(self) -> None:
        for cache in self.leaves:
            cache.finish()

    def state(self) -> list[mx.array]:
        """Arrays that passes change. The model's last one is ready when a pass is done."""
        return [state for cache in (*self._drafts, *self.own) for state in cache.state()]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.leaves)

    # -- rows that enter, decode and leave -------------------------------------------------------

    @property
    def spares(self) -> bool:
        """Whether buffers have room to spare, and hence change seldom."""
        return all(cache.spares for cache in self.leaves)

    @spares.setter
    def spares(self, spares: bool) -> None:
        for cache in self.leaves:
            cache.spares = spares

    def hold(self, slots: int) -> None:
        for cache in self.leaves:
            cache.hold(max(slots, cache.slots))

    def expect(self, tokens: int) -> None:
        """Announce a row of `tokens` tokens: growing buffers reach that length at once."""
        for cache in self.leaves:
            cache.expected_tokens = max(tokens, cache.expected_tokens)

    def move(self, moves: Moves, lengths: Ints) -> None:
        """Copy rows between slots, all at once. Rows without KV are skipped."""
        moves = [(source, target) for source, target in moves if lengths[source]]
        caches = [cache for cache in self.leaves if cache.buffers]
        copies = iter(
            copied(
                part
                for cache in caches
                for source, _ in moves
                for part in cache.row(source, int(lengths[source]))
            )
        )
        for cache in caches:
            for _, target in moves:
                cache.put_row(target, [next(copies) for _ in cache.buffers])

    def fit(self, slots: int, tokens: int, *, exactly: bool = False) -> None:
        """Shrink much too large buffers (see `SlotCache.fit`)."""
        for cache in self.leaves:
            cache.fit(slots, tokens, exactly=exactly)

    def clean(self) -> None:
        for cache in self.leaves:
            cache.clean()

    def clear(self) -> None:
        for cache in self.leaves:
            cache.clear()

    # -- blocks and snapshots: copied out of a slot, and restored into another -------------------

    def read(self, slot: int, start: int, stop: int) -> list[mx.array]:
        """(heads, stop - start, dim) views of each buffer that can be cut at a token."""
        return [part for cache in self._full for part in cache.read(slot, start, stop)]

    def write(
        self, slot: int, start: int, parts: Sequence[mx.array], room: int, leaves: slice = ALL
    ) -> None:
        """Write tokens, as `read` returns, into the layers `leaves`; with room for `room`
        tokens."""
        for cache, parts_of_cache in zip(
            self._full[leaves], dealt(parts, self._layout().full[leaves]), strict=True
        ):
            if parts_of_cache:
                cache.write(slot, start, parts_of_cache, room)

    @property
    def can_begin_with(self) -> bool:
        """Whether there is one slot and no buffer, as `begin_with` needs."""
        return not any(cache.buffers or cache.slots > 1 for cache in self._full)

    def begin_with(self, parts: Sequence[Sequence[mx.array]], room: int) -> None:
        """Make the buffers from the only slot's first tokens, in pieces for each buffer."""
        for cache, parts_of_cache in zip(
            self._full, dealt(parts, self._layout().full), strict=True
        ):
            cache.begin_with(parts_of_cache, room)

    def start(self, leaves: slice = ALL) -> None:
        mx.async_eval([state for cache in self._full[leaves] for state in cache.state()])

    def snapshot(self, slot: int, length: int) -> list[mx.array]:
        """Copy rings as after `length` tokens."""
        return [part for cache in self._rings for part in cache.snapshot(slot, length)]

    def restore_snapshot(self, slot: int, length: int, parts: Sequence[mx.array]) -> None:
        """Write the rings of a row of `length` tokens."""
        for ring, parts_of_ring in zip(
            self._rings, dealt(parts, self._layout().rings), strict=True
        ):
            if parts_of_ring:
                ring.restore(slot, length, parts_of_ring)
        mx.async_eval([ring.state() for ring in self._rings])

    # -- rows that move to another bank ----------------------------------------------------------

    def take(self, slot: int, length: int) -> list[list[mx.array]]:
        """Copy the KV of a row of `length` tokens, by cache."""
        caches = [cache for cache in self.leaves if cache.buffers]
        parts = iter(copied(part for cache in caches for part in cache.row(slot, length)))
        return [[next(parts) for _ in cache.buffers] for cache in self.leaves]

    def put(self, slot: int, length: int, parts: Sequence[Sequence[mx.array]]) -> None:
        for cache, parts_of_cache in zip(self.leaves, parts, strict=True):
            if parts_of_cache:
                cache.reserve([part[None] for part in parts_of_cache], slot + 1, length + 1)
                cache.put_row(slot, parts_of_cache)
