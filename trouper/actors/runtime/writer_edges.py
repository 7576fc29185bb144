"""Connections of SSDWriter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import attrs
import trio

from trouper.protocol.health import DirectoryStats, SchedulerStats
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskNews, DiskOrder


@attrs.frozen(eq=False)
class WriterEdges:
    """Channels and watches, closed by the graph, since they outlive a crash."""

    orders: trio.MemoryReceiveChannel[DiskOrder]
    news: trio.MemorySendChannel[DiskNews]
    stats: Watch[DirectoryStats]
    scheduler: Watch[SchedulerStats]
    reads_in_parts: bool = False
    """Whether blocks are sent run by run. Other ranks' disks are compared by complete answers."""


DiskWriter: TypeAlias = Callable[[WriterEdges, Path | None, str, Settings], Awaitable[None]]
