"""SSDWriter. Waits on orders; owns the cache directory. Nobody else writes, removes or measures there."""

from __future__ import annotations

import logging
from pathlib import Path

import attrs
import trio

from trouper.protocol.health import DirectoryFacts
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskOrder, Sweep
from trouper.storage import directory as disk

log = logging.getLogger("trouper.writer")


async def write_to_disk(
    orders: trio.MemoryReceiveChannel[DiskOrder], path: Path | None, facts: Watch[DirectoryFacts]
) -> None:
    """The actor. `path` None: no SSD tier, orders are taken and dropped. A sick disk detaches the tier and is tried
    again at the next order; it never costs a token."""
    if path is None:
        facts.publish(DirectoryFacts(reason="--no-ssd"))
    async for order in orders:
        if path is not None:
            await _carry_out(order, path, facts)


async def _carry_out(order: DiskOrder, path: Path, facts: Watch[DirectoryFacts]) -> None:
    try:
        match order:
            case Sweep(ttl_s=ttl_s):
                measured = await trio.to_thread.run_sync(_sweep, path, ttl_s)
                swept = facts.latest.swept_files + measured.swept_files
                known = attrs.evolve(facts.latest, files=measured.files, bytes=measured.bytes, swept_files=swept)
                facts.publish(
                    attrs.evolve(
                        known, path=str(path), attached=True, reason="", free_disk_bytes=measured.free_disk_bytes
                    )
                )
    except OSError as sick:
        if facts.latest.attached or not facts.latest.reason:
            log.warning("the cache directory %s is not usable (%s); going on without it", path, sick)
        facts.publish(attrs.evolve(facts.latest, path=str(path), attached=False, reason=str(sick)))


def _sweep(path: Path, ttl_s: float) -> disk.Measured:
    disk.prepare(path)
    return disk.sweep(path, ttl_s)
