"""Reads and writes on the disks of several ranks, until every rank has answered (`leader_disk`)."""

from __future__ import annotations

import attrs
import trio

from trouper.protocol.blocks import BlockData
from trouper.protocol.work import Loaded


@attrs.define(eq=False)
class PendingRead:
    missing: set[int]
    blocks: tuple[BlockData, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    """Duration of the slowest rank's read."""
    shortest: int | None = None
    """Least number of blocks of a follower; None before any answer."""
    complete: trio.Event = attrs.field(factory=trio.Event)

    def answer(self, rank: int, seconds: float) -> None:
        self.missing.discard(rank)
        self.seconds = max(self.seconds, seconds)
        if not self.missing:
            self.complete.set()

    @property
    def common_blocks(self) -> tuple[BlockData, ...]:
        return () if self.missing else self.blocks[: self.shortest]


@attrs.define(eq=False)
class PendingWrite:
    """A run of which every rank writes its part."""

    missing: set[int]
    since: float
    refused: bool = False
    nbytes: int | None = None
    """Bytes of rank 0's own write; None without such an order."""


def nothing_read(ticket: int, *, must_settle: bool = False) -> Loaded:
    return Loaded(ticket=ticket, blocks=(), nbytes=0, seconds=0.0, must_settle=must_settle)
