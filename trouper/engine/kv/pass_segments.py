"""Segments: each bank's part of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import attrs
import numpy as np

from trouper.engine.kv.attention_seam import joined
from trouper.engine.kv.banks import Bank
from trouper.engine.kv.slot_buffers import SlotBuffers
from trouper.engine.kv.slot_cache import BankCaches
from trouper.engine.passes.pass_shapes import Shapes
from trouper.engine.passes.region import Ints, Reach, Region
from trouper.protocol.plans import RowId

OWN: Callable[[SlotBuffers], Sequence[Any]] = attrgetter("caches")


@attrs.frozen(eq=False)
class Segment:
    """Contiguous slots of one bank from `start` on: the rows `range` of the pass."""

    bank: Bank
    start: int
    range: slice

    @property
    def rows(self) -> Sequence[RowId]:
        return self.bank.slots.order[self.start : self.start + self.range.stop - self.range.start]

    @property
    def lengths(self) -> Ints:
        return self.bank.slots.lengths[self.start : self.start + self.range.stop - self.range.start]


def batch(banks: Iterable[Bank]) -> list[Segment]:
    """Segments of a pass over all decoding rows."""
    segments, end = list[Segment](), 0
    for bank in banks:
        if rows := bank.slots.num_decoding:
            segments.append(Segment(bank, 0, slice(end, end + rows)))
            end += rows
    return segments


def caches_of(segments: Sequence[Segment]) -> list[BankCaches]:
    return [segment.bank.buffers.of_model for segment in segments]


def regions_of(
    segments: Sequence[Segment],
    lengths: Ints,
    counts: Ints,
    width: int,
    shapes: Shapes,
    *,
    singly: bool = False,
    deltas: Ints | None = None,
    reach: Reach | None = None,
) -> list[Region]:
    """Regions of each segment, and of all rows if there are several. lengths, counts, deltas: (n,),
    see `Region`."""

    def region(start: int, rows: slice) -> Region:
        return Region(
            start,
            lengths[rows],
            counts[rows],
            width,
            shapes,
            singly=singly,
            deltas=None if deltas is None else deltas[rows],
            reach=None if reach is None else attrs.evolve(reach, last=reach.last[rows]),
        )

    regions = [region(segment.start, segment.range) for segment in segments]
    return regions if len(segments) == 1 else [*regions, region(0, slice(None))]


def begin(
    segments: Sequence[Segment],
    regions: Sequence[Region],
    of_buffers: Callable[[SlotBuffers], Sequence[Any]] = OWN,
) -> Sequence[Any]:
    """Begin a pass in each bank. Returns the model's caches, joined for several banks.
    `of_buffers`: those caches in a bank's buffers."""
    for segment, region in zip(segments, regions, strict=False):
        segment.bank.buffers.begin(region)
    caches = [of_buffers(segment.bank.buffers) for segment in segments]
    return (
        caches[0]
        if len(caches) == 1
        else joined(caches, regions[-1], [segment.range for segment in segments])
    )


def finish(segments: Sequence[Segment]) -> None:
    """Drop the views of a built pass."""
    for segment in segments:
        segment.bank.buffers.finish()


def lengths_of(segments: Sequence[Segment]) -> Ints:
    """(n,): a copy of the rows' lengths."""
    return np.concatenate([segment.lengths for segment in segments])


def rows_of(segments: Sequence[Segment]) -> list[RowId]:
    return [row for segment in segments for row in segment.rows]


def add_tokens(segments: Sequence[Segment], tokens: Ints) -> None:
    for segment in segments:
        lengths = segment.lengths
        lengths += tokens[segment.range]
