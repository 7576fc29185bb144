"""Reads and writes that the disks of several ranks carry out, until every rank has answered.
`leader_disk` has the protocol."""

from __future__ import annotations

import attrs
import trio

from trouper.protocol.blocks import BlockData
from trouper.protocol.work import Loaded


@attrs.define(eq=False)
class PendingRead:
    """A read that ranks are carrying out."""

    missing: set[int]
    """Ranks that have not answered."""
    blocks: tuple[BlockData, ...] = ()
    """Blocks that rank 0 has read."""
    nbytes: int = 0
    seconds: float = 0.0
    """Duration of the slowest rank's read."""
    shortest: int | None = None
    """Minimum number of blocks that a follower has; None before the first answer."""
    complete: trio.Event = attrs.field(factory=trio.Event)

    def answer(self, rank: int, seconds: float) -> None:
        self.missing.discard(rank)
        self.seconds = max(self.seconds, seconds)
        if not self.missing:
            self.complete.set()

    @property
    def common_blocks(self) -> tuple[BlockData, ...]:
        """Blocks that every rank has."""
        return () if self.missing else self.blocks[: self.shortest]


@attrs.define(eq=False)
class PendingWrite:
    """A run of which every rank writes its part."""

    missing: set[int]
    """Ranks that have not answered."""
    since: float
    refused: bool = False
    nbytes: int | None = None
    """Bytes of rank 0's own write; None if rank 0 has no such order."""


def nothing_read(ticket: int, *, must_settle: bool = False) -> Loaded:
    """The answer to a read that gave no block."""
    return Loaded(ticket=ticket, blocks=(), nbytes=0, seconds=0.0, must_settle=must_settle)
