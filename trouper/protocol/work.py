"""Orders to SSDWriter, and news to Scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from trouper.protocol.blocks import BlockData, BlockRef, Tensors


@attrs.frozen
class Sweep:
    """Order to remove orphaned temporary files and files unused for `ttl_s` seconds, enforce
    bounds, detect other changes, and measure the directory."""

    ttl_s: float


@attrs.frozen
class Inspect:
    """Order for idle times: verify some files and remove damaged ones."""


@attrs.frozen
class Poll:
    """SSDWriter's own order: what other servers of the directory have written and removed."""


@attrs.frozen
class Announce:
    """Order to announce the whole catalogue to a new scheduler."""


@attrs.frozen(eq=False)
class Write:
    """Order to write consecutive blocks of one chain. `parent`: key of the block before."""

    parent: bytes
    blocks: tuple[BlockData, ...]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


@attrs.frozen
class Run:
    """Consecutive blocks of one chain: on disk, or a future `Write` without bytes yet."""

    parent: bytes
    blocks: tuple[BlockRef, ...]

    def linked(self) -> Iterator[tuple[bytes, BlockRef]]:
        return zip(
            (self.parent, *(block.key for block in self.blocks[:-1])), self.blocks, strict=True
        )

    def filled(self, data: Sequence[Tensors]) -> Write:
        """Make the `Write` from the requested payloads and snapshots, in order."""
        remaining = iter(data)
        return Write(
            self.parent,
            tuple(
                BlockData(
                    block.key,
                    block.tokens,
                    next(remaining) if block.payload else (),
                    next(remaining) if block.snapshot else None,
                )
                for block in self.blocks
            ),
        )


@attrs.frozen
class Read:
    ticket: int
    blocks: tuple[BlockRef, ...]


DiskOrder = Sweep | Inspect | Poll | Announce | Write | Read


@attrs.frozen
class Catalogue:
    """News of runs on disk, each after its predecessor."""

    runs: tuple[Run, ...]
    complete: bool = True
    """Whether the catalogue ends here."""


@attrs.frozen
class RemovedFromDisk:
    """News that these blocks are no longer on disk."""

    keys: tuple[bytes, ...]


@attrs.frozen
class Written:
    """News that a write was done, or `refused`: no room, write budget spent, or a faulty disk."""

    keys: tuple[bytes, ...]
    nbytes: int
    refused: bool = False


@attrs.frozen(eq=False)
class Loaded:
    """Answer to a `Read`: a part of the requested blocks, up to the first unreadable one."""

    ticket: int
    blocks: tuple[BlockData, ...]
    nbytes: int
    seconds: float
    must_settle: bool = False
    """Whether other ranks keep the blocks until a plan settles the ticket."""
    complete: bool = True
    """Whether this is the last part."""


@attrs.frozen
class OrdersForgotten:
    """News that SSDWriter crashed: earlier orders are lost."""


DiskNews = Catalogue | RemovedFromDisk | Written | Loaded | OrdersForgotten
