from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from trouper.engine.passes.region import Ints
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
