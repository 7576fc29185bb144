"""The CacheJanitor actor. Waits on a clock; owns the memory limit, the TTL, and the orders to sweep
and inspect the cache directory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import attrs
import trio

from trouper.actors.runtime.channels import offer
from trouper.protocol.health import (
    NO_ADAPTERS,
    AdapterStats,
    MemoryPressure,
    MemoryStatus,
    SchedulerStats,
)
from trouper.protocol.model import MemoryStats
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskOrder, Inspect, Sweep

KEEPS: Final[dict[MemoryPressure, float]] = {"warning": 0.9, "critical": 0.67}
"""Share of the bytes in use that stays."""
GROWS: Final = 1.25
# Less would gain nothing, and take longer than minutes to return from.
FLOOR: Final = 1024
"""Denominator of the least bound, as a share of the device's limit."""
# Growth alone counts: a Mac keeps memory in swap long after it was short.
SWAP_GROWTH: Final = 0.005
"""Growth of swap between two looks that is a warning, as a share of the device's limit."""
log = logging.getLogger("trouper.cache_janitor")
# The TTL is counted in days, and orphaned temporary files are rare.
SWEEP_EVERY_S = 600.0
INSPECT_EVERY_S = 60.0
# Spare buffers make the allocator fast, and a few always exist.
WORTH_RELEASING = 0.01
"""Least gain of a release, as a share of the device's limit."""
FEW_ROWS = 4
# A burst of 60 clients left 1.8 times that memory behind.
MAX_KEPT = 1.05
"""Multiple of the resident memory before a burst above which a release is worth its cost."""
# A release costs the next step some milliseconds.
MAX_LOOKS = 7
"""Maximum number of looks between two releases in vain."""


async def keep_tidy(
    orders: trio.MemorySendChannel[DiskOrder],
    read_memory: Callable[[], MemoryStats],
    memory: Watch[MemoryStatus],
    scheduler: Watch[SchedulerStats],
    settings: Settings,
    *,
    adapters: Watch[AdapterStats],
) -> None:
    """Run the actor, which never ends by itself. A full `orders` sheds. The graph closes `orders`,
    since the channel outlives a crash."""
    next_sweep = next_inspection = trio.current_time()
    kept_bytes, process, fixed, bound = 0, ProcessMemory(), FixedMemory(), PressureBound()
    while True:
        stats, last = read_memory(), memory.latest
        kept_bytes = min(kept_bytes, stats.spare_bytes)
        pressure = bound.look(stats, scheduler.latest.kv_row_bytes + scheduler.latest.cache.bytes)
        status = judge(
            attrs.evolve(stats, pressure=pressure), last, settings.memory_fraction, kept_bytes
        )
        status = attrs.evolve(
            status,
            fixed_bytes=fixed.measured(stats, scheduler.latest, adapters.latest),
            pressure_bound_bytes=bound.bound_bytes,
        )
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
class FixedMemory:
    """Memory besides rows, cached blocks and LoRA adapters: weights, kernels, other models of the
    process. Measured without rows and adapters."""

    # The smaller of two consecutive measurements counts: a row may leave its memory a moment after
    # its end.

    nbytes: int = 0
    # Result of the last look, if no row ran.
    _last: int | None = None

    def measured(
        self, stats: MemoryStats, scheduler: SchedulerStats, adapters: AdapterStats = NO_ADAPTERS
    ) -> int:
        if scheduler.active_sequences or adapters.reserved_bytes:
            self._last = None
            return self.nbytes
        now = max(0, stats.active_bytes - scheduler.cache.bytes - adapters.held_bytes)
        if self._last is not None:
            self.nbytes = min(now, self._last)
        self._last = now
        return self.nbytes


@attrs.define
class ProcessMemory:
    """Decides when to release freed memory: after many rows, once few are left."""

    # While many rows run, the next step would need the memory again. A release in vain is tried
    # again later and later: a long row may need the memory to its end.

    lowest_bytes: int = 0
    """Resident bytes; 0: unknown."""
    # Maximum number of rows since memory was last near the least.
    _busiest: int = 0
    # Resident memory at the last release.
    _bytes_before: int = 0
    # Number of looks between two releases.
    _pause: int = 0
    _looks_to_wait: int = 0

    def is_worth_releasing(self, resident_bytes: int, rows: int) -> bool:
        self.lowest_bytes = min(self.lowest_bytes or resident_bytes, resident_bytes)
        self._busiest = max(self._busiest, rows)
        if resident_bytes <= self.lowest_bytes * MAX_KEPT:
            self._busiest, self._bytes_before, self._pause, self._looks_to_wait = rows, 0, 0, 0
            return False
        self._looks_to_wait -= 1
        if rows > max(FEW_ROWS, self._busiest // 8) or self._looks_to_wait >= 0:
            return False
        if resident_bytes * MAX_KEPT > self._bytes_before > 0:
            self._pause = min(2 * self._pause + 1, MAX_LOOKS)
        else:
            self._pause = 0
        self._bytes_before, self._looks_to_wait = resident_bytes, self._pause
        return True


def judge(
    stats: MemoryStats, last: MemoryStatus, fraction: float, kept_bytes: int = 0
) -> MemoryStatus:
    """Compare the memory in use with the device's limit (R14). `kept_bytes`: spare memory that the
    last release did not free. Where the system is short of memory, no part of the limit is free."""
    # Spare buffers are released before requests wait, but only above the bound and if worth it
    # (F25).
    bound, is_short = stats.limit_bytes * fraction, stats.pressure in KEEPS
    too_much = is_short or stats.active_bytes + stats.spare_bytes > bound
    helps = stats.spare_bytes - kept_bytes > stats.limit_bytes * WORTH_RELEASING
    return attrs.evolve(
        last,
        active_bytes=stats.active_bytes,
        spare_bytes=stats.spare_bytes,
        limit_bytes=stats.limit_bytes,
        under_pressure=is_short or stats.active_bytes > bound,
        releases=last.releases + (too_much and helps),
        pressure=stats.pressure,
    )


@attrs.define
class PressureBound:
    bound_bytes: int = 0
    _swapped_bytes: int | None = None

    def look(self, stats: MemoryStats, used_bytes: int) -> MemoryPressure:
        # The device's own limit says nothing of other programs. Under pressure the bound shrinks at
        # each look; blocks are evicted, then rows preempted (`kv_memory`). Afterwards the bound
        # grows until it no longer binds.
        pressure = self._pressure(stats)
        if (part := KEEPS.get(pressure)) is not None:
            bound = int(min(used_bytes, self.bound_bytes or used_bytes) * part)
            self.bound_bytes = max(1, stats.limit_bytes // FLOOR, bound)
        elif self.bound_bytes:
            grown = int(self.bound_bytes * GROWS) + 1
            self.bound_bytes = grown if grown < stats.limit_bytes else 0
        return pressure

    def _pressure(self, stats: MemoryStats) -> MemoryPressure:
        before, self._swapped_bytes = self._swapped_bytes, stats.swapped_bytes
        grew = before is not None and stats.swapped_bytes - before > stats.limit_bytes * SWAP_GROWTH
        return "warning" if grew and stats.pressure not in KEEPS else stats.pressure
