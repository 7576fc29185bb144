"""What the core of the scheduler is connected to besides its caller: watches, and the way to the
disk."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from trouper.actors.scheduling.disk_tier import ANSWER_S
from trouper.protocol.batch import BatchStats
from trouper.protocol.health import (
    NO_ADAPTERS,
    AdapterStats,
    DirectoryStats,
    MemoryStatus,
    RanksStats,
    SchedulerStats,
)
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskOrder


@attrs.frozen(kw_only=True, eq=False)
class CoreWatches:
    """What the core publishes, and what it looks at. A watch holds the latest value; looking at it
    never blocks."""

    stats: Watch[SchedulerStats]
    memory: Watch[MemoryStatus]
    directory: Watch[DirectoryStats]
    last_viewed_at: Watch[float]
    batch: Watch[BatchStats]
    adapters: Watch[AdapterStats] = attrs.field(factory=lambda: Watch(NO_ADAPTERS))
    ranks: Watch[RanksStats] = attrs.field(factory=lambda: Watch(RanksStats()))
    draining: Watch[bool] = attrs.field(factory=lambda: Watch(False))


@attrs.frozen(kw_only=True, eq=False)
class DiskSeam:
    """The way to SSDWriter. send: False if an order finds no room, or nobody carries it out. known:
    called once all that lies on disk is known, or that nothing does. answer_s: longest time for
    which it may say nothing while a request waits; inf: SSDWriter's side has a limit of its own."""

    send: Callable[[DiskOrder], bool]
    known: Callable[[], object]
    answer_s: float = ANSWER_S
