"""CacheJanitor. Waits on a clock; owns the memory limit, the TTL, and the order to sweep the cache directory."""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs
import trio

from trouper.protocol.health import MemoryStatus, SchedulerStats
from trouper.protocol.model import MemoryStats
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskOrder, Inspect, Sweep

log = logging.getLogger("trouper.janitor")

SWEEP_EVERY_S = 600.0
"""TTL is counted in days; orphaned temporary files are rare."""
INSPECT_EVERY_S = 60.0
"""While nobody is served."""
WORTH_RELEASING = 0.01
"""Of the device's limit. Spare buffers are what makes the allocator fast; a few of them are always there."""

FEW_ROWS = 4
MOST_KEPT = 1.05
"""Of what the process had before: 60 clients at once left 1.8 times that behind."""


async def keep_tidy(
    orders: trio.MemorySendChannel[DiskOrder],
    look: Callable[[], MemoryStats],
    memory: Watch[MemoryStatus],
    scheduler: Watch[SchedulerStats],
    settings: Settings,
) -> None:
    """The actor. Never ends by itself. A full `orders` sheds: the writer has enough to do. `orders` outlives a crash, so
    the graph closes it, not this. While nobody is served, what lies on disk is inspected a few files at a time."""
    next_sweep = next_look = trio.current_time()
    kept_bytes, process = 0, ProcessMemory()
    while True:
        facts, last = look(), memory.latest
        kept_bytes = min(kept_bytes, facts.spare_bytes)
        status = judge(facts, last, settings.memory_fraction, kept_bytes)
        if process.is_worth_releasing(facts.resident_bytes, scheduler.latest.active_sequences):
            status = attrs.evolve(status, releases=last.releases + 1)
        memory.publish(status)
        if memory.latest.releases > last.releases:
            kept_bytes = facts.spare_bytes
        if trio.current_time() >= next_sweep:
            next_sweep = trio.current_time() + SWEEP_EVERY_S
            _order(orders, Sweep(settings.ssd_ttl_days * 86400))
        if trio.current_time() >= next_look and not scheduler.latest.active_sequences:
            next_look = trio.current_time() + INSPECT_EVERY_S
            _order(orders, Inspect())
        await trio.sleep(settings.janitor_interval_s)


def _order(orders: trio.MemorySendChannel[DiskOrder], order: DiskOrder) -> None:
    try:
        orders.send_nowait(order)
    except trio.WouldBlock:
        log.debug("the disk has enough to do; %s must wait", order)


@attrs.define
class ProcessMemory:
    """When to ask back what the process keeps of memory that was freed: after many rows, once few are left. While the rows
    that needed it are there it is not asked for, since the next step would need it again."""

    settled_bytes: int = 0
    """What the process had when it last kept nothing that it did not need; 0: not known yet."""
    _busiest: int = 0
    """Most rows at one time since then."""
    _asked_bytes: int = 0
    """What it had when it was asked for, last time; 0 if it was not."""

    def is_worth_releasing(self, resident_bytes: int, rows: int) -> bool:
        nothing_given = self._asked_bytes and resident_bytes * MOST_KEPT > self._asked_bytes
        if not self.settled_bytes or nothing_given or resident_bytes < self.settled_bytes:
            self.settled_bytes, self._busiest, self._asked_bytes = resident_bytes, rows, 0
            return False
        self._busiest = max(self._busiest, rows)
        few = rows <= max(FEW_ROWS, self._busiest // 8)
        worth = few and resident_bytes > self.settled_bytes * MOST_KEPT
        self._asked_bytes = resident_bytes if worth else 0
        return worth


def judge(facts: MemoryStats, last: MemoryStatus, fraction: float, kept_bytes: int = 0) -> MemoryStatus:
    """Pressure is what is in use against the device's own limit (R14). Spare buffers are asked back before requests
    have to wait, but never for ever (F25): only when the bound is passed and there is spare memory worth having beyond
    `kept_bytes`, which is what was there when it was last asked for and has not been given since."""
    bound = facts.limit_bytes * fraction
    too_much = facts.active_bytes + facts.spare_bytes > bound
    helps = facts.spare_bytes - kept_bytes > facts.limit_bytes * WORTH_RELEASING
    return attrs.evolve(
        last,
        active_bytes=facts.active_bytes,
        spare_bytes=facts.spare_bytes,
        limit_bytes=facts.limit_bytes,
        under_pressure=facts.active_bytes > bound,
        releases=last.releases + (too_much and helps),
    )
