"""Segments: the part of a pass that each bank has."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trouper.engine.kv.banks import Bank
from trouper.engine.kv.region import Ints
from trouper.protocol.plans import RowId


@attrs.frozen(eq=False)
class Segment:
    """The slots of one bank in a pass: contiguous ones from `start` on, whose rows are the rows `range` of the pass."""

    bank: Bank
    start: int
    range: slice

    @property
    def rows(self) -> Sequence[RowId]:
        """The rows in these slots."""
        return self.bank.slots.order[self.start : self.start + self.range.stop - self.range.start]

    @property
    def lengths(self) -> Ints:
        """View of the lengths of the rows."""
        return self.bank.slots.lengths[self.start : self.start + self.range.stop - self.range.start]


def add_tokens(segments: Sequence[Segment], tokens: Ints) -> None:
    """Add to the lengths of the rows of these segments."""
    for segment in segments:
        lengths = segment.lengths
        lengths += tokens[segment.range]
