"""CacheJanitor. Waits on a clock; owns the memory limit, the TTL, and the order to sweep the cache directory."""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs
import trio

from trouper.protocol.health import MemoryStatus
from trouper.protocol.model import MemoryFacts
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch
from trouper.protocol.work import Sweep

log = logging.getLogger("trouper.janitor")

SWEEP_EVERY_S = 600.0
"""TTL is counted in days; orphaned temporary files are rare."""


async def keep_tidy(
    sweeps: trio.MemorySendChannel[Sweep],
    look: Callable[[], MemoryFacts],
    memory: Watch[MemoryStatus],
    settings: Settings,
) -> None:
    """The actor. Never ends by itself. A full `sweeps` sheds: the writer has one to do already. `sweeps` outlives a
    crash, so the graph closes it, not this."""
    next_sweep = trio.current_time()
    while True:
        memory.publish(judge(look(), memory.latest, settings.memory_fraction))
        if trio.current_time() >= next_sweep:
            next_sweep = trio.current_time() + SWEEP_EVERY_S
            try:
                sweeps.send_nowait(Sweep(settings.ssd_ttl_days * 86400))
            except trio.WouldBlock:
                log.debug("a sweep waits already")
        await trio.sleep(settings.janitor_interval_s)


def judge(facts: MemoryFacts, last: MemoryStatus, fraction: float) -> MemoryStatus:
    """Pressure is what is in use against the device's own limit (R14, F25). Spare buffers are given back before
    requests have to wait, and only when that helps: spare memory exists and the bound is passed."""
    bound = facts.limit_bytes * fraction
    too_much = facts.active_bytes + facts.spare_bytes > bound
    return attrs.evolve(
        last,
        active_bytes=facts.active_bytes,
        spare_bytes=facts.spare_bytes,
        limit_bytes=facts.limit_bytes,
        under_pressure=facts.active_bytes > bound,
        releases=last.releases + (too_much and facts.spare_bytes > 0),
    )
