"""Orders to SSDWriter, and its news to Scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from trouper.protocol.blocks import BlockData, BlockRef, Tensors


@attrs.frozen
class Sweep:
    """Order to remove orphaned temporary files and cached files unused for `ttl_s` seconds, to
    enforce the bounds, to detect other changes, and then to measure the directory."""

    ttl_s: float


@attrs.frozen
class Inspect:
    """Order for idle times: verify some of the files and remove damaged ones."""


@attrs.frozen
class Announce:
    """Order to announce the whole catalogue to a scheduler that knows nothing of it."""


@attrs.frozen(eq=False)
class Write:
    """Order to write consecutive blocks of one chain. `parent` is the key of the block that the
    first one continues."""

    parent: bytes
    blocks: tuple[BlockData, ...]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


@attrs.frozen
class Run:
    """Consecutive blocks of one chain: on disk already, or a future `Write` whose bytes are not
    available yet. `parent`: as in `Write`."""

    parent: bytes
    blocks: tuple[BlockRef, ...]

    def linked(self) -> Iterator[tuple[bytes, BlockRef]]:
        """Each block with the key of its parent: the block before it."""
        return zip(
            (self.parent, *(block.key for block in self.blocks[:-1])), self.blocks, strict=True
        )

    def filled(self, data: Sequence[Tensors]) -> Write:
        """Make the `Write` from the requested payloads and snapshots of the blocks, in order."""
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
    """Order to read these blocks into memory, in this order."""

    ticket: int
    blocks: tuple[BlockRef, ...]


DiskOrder = Sweep | Inspect | Announce | Write | Read


@attrs.frozen
class Catalogue:
    """News that these runs are on disk. A run comes after the one that it continues."""

    runs: tuple[Run, ...]
    complete: bool = True
    """Whether the catalogue is complete with this message."""


@attrs.frozen
class RemovedFromDisk:
    """News that the blocks with these keys are no longer on disk."""

    keys: tuple[bytes, ...]


@attrs.frozen
class Written:
    """News that a write was carried out, or `refused`: no room, write budget spent, or a faulty
    disk."""

    keys: tuple[bytes, ...]
    nbytes: int
    refused: bool = False


@attrs.frozen(eq=False)
class Loaded:
    """Answer to a `Read`: the requested blocks up to the first one that could not be read, or the
    next part of them."""

    ticket: int
    blocks: tuple[BlockData, ...]
    nbytes: int
    seconds: float
    must_settle: bool = False
    """Whether other ranks keep their blocks until a plan settles the ticket."""
    complete: bool = True
    """Whether no more parts follow."""


@attrs.frozen
class OrdersForgotten:
    """News that SSDWriter has crashed: nobody carries out what was ordered before."""


DiskNews = Catalogue | RemovedFromDisk | Written | Loaded | OrdersForgotten
