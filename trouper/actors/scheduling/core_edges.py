from __future__ import annotations

from collections.abc import Callable
from math import inf

import attrs

from trouper.actors.scheduling.disk_tier import ANSWER_S
from trouper.protocol.batch import NOTHING_SHOWN, BatchStats
from trouper.protocol.health import (
    NO_ADAPTERS,
    AdapterStats,
    DirectoryStats,
    MemoryStatus,
    RanksStats,
    SchedulerStats,
)
from trouper.protocol.media import DecodeImage
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskOrder


@attrs.frozen(kw_only=True, eq=False)
class CoreWatches:
    """A watch holds the latest value and never blocks."""

    stats: Watch[SchedulerStats] = attrs.field(factory=lambda: Watch(SchedulerStats()))
    memory: Watch[MemoryStatus] = attrs.field(factory=lambda: Watch(MemoryStatus()))
    directory: Watch[DirectoryStats] = attrs.field(factory=lambda: Watch(DirectoryStats()))
    last_viewed_at: Watch[float] = attrs.field(factory=lambda: Watch(-inf))
    batch: Watch[BatchStats] = attrs.field(factory=lambda: Watch(NOTHING_SHOWN))
    adapters: Watch[AdapterStats] = attrs.field(factory=lambda: Watch(NO_ADAPTERS))
    """Published by the `Runtime`, before an adapter is loaded."""
    ranks: Watch[RanksStats] = attrs.field(factory=lambda: Watch(RanksStats()))
    draining: Watch[bool] = attrs.field(factory=lambda: Watch(False))
    """Whether the graph was told to end, which is no fault. Published by the `Runtime`."""


def send_nowhere(order: DecodeImage) -> None:
    raise AssertionError(f"image {order.item} is ordered for a model that takes none")


@attrs.frozen(kw_only=True, eq=False)
class DiskSeam:
    """The way to SSDWriter. `send` returns False for a refused order. `known` is called once the
    disk's content is known. `answer_s`: longest silence while a request waits."""

    send: Callable[[DiskOrder], bool]
    known: Callable[[], object]
    answer_s: float = ANSWER_S
