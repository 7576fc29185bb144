"""The graph's channels: the contract of each, and its fill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import attrs
import trio

from trouper.actors.scheduling.core_edges import CoreWatches
from trouper.protocol.health import (
    ActorStats,
    AdapterStats,
    ChannelStats,
    DirectoryStats,
    MemoryStatus,
    RanksStats,
    SchedulerStats,
)
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch

T = TypeVar("T")


@attrs.frozen
class Edge:
    """A channel's contract, which docs/actors.md repeats (a test compares)."""

    source: str
    target: str
    capacity: int
    policy: str


class Channels:
    """Channels by name. Statistics cost their reader, never a sender."""

    def __init__(self, edges: Mapping[str, Edge]) -> None:
        self._edges = edges
        self._opened: dict[str, trio.MemorySendChannel[Any]] = {}
        self._peaks = dict.fromkeys(edges, 0)

    def open(self, name: str) -> tuple[trio.MemorySendChannel[Any], trio.MemoryReceiveChannel[Any]]:
        """Open a channel, perhaps in place of that of a crashed group."""
        sending, receiving = trio.open_memory_channel[Any](self._edges[name].capacity)
        self._opened[name] = sending
        return sending, receiving

    def stats(self) -> tuple[ChannelStats, ...]:
        self.note_peaks()
        return tuple(
            _stats(name, self._edges[name], opened, self._peaks[name])
            for name, opened in self._opened.items()
        )

    def note_peaks(self) -> None:
        for name, opened in self._opened.items():
            self._peaks[name] = max(self._peaks[name], opened.statistics().current_buffer_used)


def offer(channel: trio.MemorySendChannel[T], message: T) -> bool:
    """Send without waiting. False if the channel is full, or nobody receives."""
    try:
        channel.send_nowait(message)
    except (trio.WouldBlock, trio.BrokenResourceError):
        return False
    return True


def _stats(name: str, edge: Edge, opened: trio.MemorySendChannel[Any], peak: int) -> ChannelStats:
    state = opened.statistics()
    return ChannelStats(
        name=name,
        source=edge.source,
        target=edge.target,
        capacity=edge.capacity,
        policy=edge.policy,
        used=state.current_buffer_used,
        peak=peak,
        senders_waiting=state.tasks_waiting_send,
    )


STUCK_FACTOR = 10  # Multiple of --stall-timeout-s after which the device counts as dead.

Status = Literal["ok", "restarting", "stalled", "stuck", "draining", "unloading", "failed", "lost"]
Leaving = Literal["", "unloaded", "asleep"]
"""State of a model after the end of its graph, while the server goes on; "": the graph stays, or
the server ends."""


@attrs.frozen(kw_only=True)
class Health:
    """Everything that the actors publish, at one moment."""

    status: Status
    detail: str
    """One line for a person when the status is not ok."""
    scheduler: SchedulerStats
    memory: MemoryStatus
    adapters: AdapterStats
    directory: DirectoryStats
    actors: tuple[ActorStats, ...]
    ranks: RanksStats

    @property
    def ready(self) -> bool:
        return self.status == "ok"


def _actor(name: str) -> Watch[ActorStats]:
    return Watch(ActorStats(name=name))


@attrs.frozen(eq=False)
class Watches(CoreWatches):
    settings: Settings
    request_intake: Watch[ActorStats] = attrs.field(factory=lambda: _actor("RequestIntake"))
    group: Watch[ActorStats] = attrs.field(
        factory=lambda: _actor("Scheduler+RankMirror+ModelStepper")
    )
    cache_janitor: Watch[ActorStats] = attrs.field(factory=lambda: _actor("CacheJanitor"))
    ssd_writer: Watch[ActorStats] = attrs.field(factory=lambda: _actor("SSDWriter"))
    image_decoder: Watch[ActorStats] = attrs.field(factory=lambda: _actor("ImageDecoder"))
    """Not started if the model takes no images."""

    def health(self, *, draining: bool, leaving: Leaving = "") -> Health:
        status, detail = self._status(draining=draining)
        if leaving and status in ("draining", "ok"):
            doing = "put to sleep" if leaving == "asleep" else "unloaded"
            status = "unloading"
            detail = f"the model is being {doing}; a request for it waits, and loads it again"
        return Health(
            status=status,
            detail=detail,
            scheduler=self.stats.latest,
            memory=self.memory.latest,
            adapters=self.adapters.latest,
            directory=self.directory.latest,
            actors=self._actors(),
            ranks=self.ranks.latest,
        )

    def _actors(self) -> tuple[ActorStats, ...]:
        watches = [self.request_intake, self.group, self.cache_janitor, self.ssd_writer]
        if self.image_decoder.latest.state != "starting":
            watches.append(self.image_decoder)
        return tuple(watch.latest for watch in watches)

    def _status(self, *, draining: bool) -> tuple[Status, str]:
        group, since = self.group.latest, self.stats.latest.stalled_since
        if self.ranks.latest.lost:
            return "lost", self.ranks.latest.lost
        if draining:
            return "draining", "the server is shutting down"
        if "failed" in (group.state, self.request_intake.latest.state):
            return "failed", group.last_error or self.request_intake.latest.last_error
        if group.state != "running" or self.request_intake.latest.state != "running":
            return "restarting", group.last_error or self.request_intake.latest.last_error
        if since is not None:
            waited = trio.current_time() - since
            stuck = waited > STUCK_FACTOR * self.settings.stall_timeout_s
            return (
                "stuck" if stuck else "stalled"
            ), f"the engine has not finished a step for {waited:.0f} s"
        return "ok", ""
