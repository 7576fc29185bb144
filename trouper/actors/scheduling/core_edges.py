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
from trouper.protocol.media import DecodeImage
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskOrder


@attrs.frozen(kw_only=True, eq=False)
class CoreWatches:
    """A watch holds the latest value and never blocks."""

    stats: Watch[SchedulerStats]
    memory: Watch[MemoryStatus]
    directory: Watch[DirectoryStats]
    last_viewed_at: Watch[float]
    batch: Watch[BatchStats]
    adapters: Watch[AdapterStats] = attrs.field(factory=lambda: Watch(NO_ADAPTERS))
    ranks: Watch[RanksStats] = attrs.field(factory=lambda: Watch(RanksStats()))
    draining: Watch[bool] = attrs.field(factory=lambda: Watch(False))


def send_nowhere(order: DecodeImage) -> None:
    raise AssertionError(f"image {order.item} is ordered for a model that takes none")


@attrs.frozen(kw_only=True, eq=False)
class DiskSeam:
    """The way to SSDWriter. `send` returns False for a refused order. `known` is called once the
    disk's content is known. `answer_s`: longest silence while a request waits."""

    send: Callable[[DiskOrder], bool]
    known: Callable[[], object]
    answer_s: float = ANSWER_S
