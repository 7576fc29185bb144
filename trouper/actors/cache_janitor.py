"""The CacheJanitor actor. It waits on a clock, and owns the memory limit, the TTL and the orders to sweep and inspect the
cache directory."""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs
import trio

from trouper.actors.runtime.channels import offer
from trouper.protocol.health import MemoryStatus, SchedulerStats
from trouper.protocol.model import MemoryStats
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskOrder, Inspect, Sweep

log = logging.getLogger("trouper.janitor")

SWEEP_EVERY_S = 600.0
"""Interval of sweeps. The TTL is counted in days, and orphaned temporary files are rare."""
INSPECT_EVERY_S = 60.0
"""Interval of inspections while no request is served."""
WORTH_RELEASING = 0.01
"""Minimum share of the device's limit that a release must gain. Spare buffers make the allocator fast, and a few of them always
exist."""

FEW_ROWS = 4
"""Number of rows up to which a release of freed memory does not slow the next step."""
MAX_KEPT = 1.05
"""Resident memory, as a multiple of what the process had before a burst, above which a release is worth it. A burst of 60
clients left 1.8 times that behind."""
RELEASE_TRIES = 2
"""Number of releases that gain nothing after which the memory counts as needed. One is not enough: on a busy machine the engine
may not have come to it before the next look."""


async def keep_tidy(
    orders: trio.MemorySendChannel[DiskOrder],
    read_memory: Callable[[], MemoryStats],
    memory: Watch[MemoryStatus],
    scheduler: Watch[SchedulerStats],
    settings: Settings,
) -> None:
    """Run the actor. It never ends by itself. A full `orders` sheds, since the writer has enough to do. `orders` outlives a crash,
    so the graph closes it. While no request is served, the actor orders inspections of a few files at a time."""
    next_sweep = next_inspection = trio.current_time()
    kept_bytes, process = 0, ProcessMemory()
    while True:
        stats, last = read_memory(), memory.latest
        kept_bytes = min(kept_bytes, stats.spare_bytes)
        status = judge(stats, last, settings.memory_fraction, kept_bytes)
        if process.is_worth_releasing(stats.resident_bytes, scheduler.latest.active_sequences):
            status = attrs.evolve(status, releases=last.releases + 1)
        memory.publish(status)
        if memory.latest.releases > last.releases:
            kept_bytes = stats.spare_bytes
        if trio.current_time() >= next_sweep:
            next_sweep = trio.current_time() + SWEEP_EVERY_S
            _order(orders, Sweep(settings.ssd_ttl_days * 86400))
        if trio.current_time() >= next_inspection and not scheduler.latest.active_sequences:
            next_inspection = trio.current_time() + INSPECT_EVERY_S
            _order(orders, Inspect())
        await trio.sleep(settings.janitor_interval_s)


def _order(orders: trio.MemorySendChannel[DiskOrder], order: DiskOrder) -> None:
    if not offer(orders, order):
        log.debug("the disk has enough to do; %s must wait", order)


@attrs.define
class ProcessMemory:
    """Decides when to release memory that the process has freed but still holds: after many rows, once few are left. While many
    rows run nothing is released, since the next step would need the memory again."""

    settled_bytes: int = 0
    """Resident memory when the process last held none that it did not need; 0: not known yet."""
    _busiest: int = 0
    """Maximum number of rows at one time since then."""
    _bytes_before: int = 0
    """Resident memory at the last request for a release; 0 if the last look requested none."""
    _failed_tries: int = 0
    _accepted_rows: int = 0
    """Number of rows when memory was last taken for needed."""
    _settled_before: int = 0
    """`settled_bytes` before that. Once fewer rows run, it holds again: a long row needs its KV only until its end."""

    def is_worth_releasing(self, resident_bytes: int, rows: int) -> bool:
        gained_nothing = self._bytes_before and resident_bytes * MAX_KEPT > self._bytes_before
        self._failed_tries = self._failed_tries + 1 if gained_nothing else 0
        if rows < self._accepted_rows:
            self.settled_bytes, self._accepted_rows = self._settled_before, 0
        if self._failed_tries >= RELEASE_TRIES:
            self._accepted_rows, self._settled_before = rows, self.settled_bytes
            self._settle(resident_bytes, rows)
            return False
        if not self.settled_bytes or resident_bytes < self.settled_bytes:
            self._settle(resident_bytes, rows)
            return False
        self._busiest = max(self._busiest, rows)
        few = rows <= max(FEW_ROWS, self._busiest // 8)
        worth = few and resident_bytes > self.settled_bytes * MAX_KEPT
        self._bytes_before = resident_bytes if worth else 0
        return worth

    def _settle(self, resident_bytes: int, rows: int) -> None:
        self.settled_bytes, self._busiest, self._bytes_before, self._failed_tries = resident_bytes, rows, 0, 0


def judge(stats: MemoryStats, last: MemoryStatus, fraction: float, kept_bytes: int = 0) -> MemoryStatus:
    """Compare the memory in use with the device's own limit (R14). Spare buffers are released before requests have to wait, but
    not in every round (F25): only when the bound is exceeded and the spare memory beyond `kept_bytes` is worth a release.
    `kept_bytes` is the spare memory that the last release did not free."""
    bound = stats.limit_bytes * fraction
    too_much = stats.active_bytes + stats.spare_bytes > bound
    helps = stats.spare_bytes - kept_bytes > stats.limit_bytes * WORTH_RELEASING
    return attrs.evolve(
        last,
        active_bytes=stats.active_bytes,
        spare_bytes=stats.spare_bytes,
        limit_bytes=stats.limit_bytes,
        under_pressure=stats.active_bytes > bound,
        releases=last.releases + (too_much and helps),
    )
