"""All watches of one graph, and the health derived from them."""

from __future__ import annotations

from math import inf
from typing import Literal

import attrs
import trio

from trouper.protocol.batch import NOTHING_SHOWN, BatchStats
from trouper.protocol.health import (
    NO_ADAPTERS,
    ActorStats,
    AdapterStats,
    DirectoryStats,
    MemoryStatus,
    RanksStats,
    SchedulerStats,
)
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch

STUCK_FACTOR = 10
"""Multiple of --stall-timeout-s after which the device counts as dead."""

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
class Watches:
    settings: Settings
    stats: Watch[SchedulerStats] = attrs.field(factory=lambda: Watch(SchedulerStats()))
    memory: Watch[MemoryStatus] = attrs.field(factory=lambda: Watch(MemoryStatus()))
    directory: Watch[DirectoryStats] = attrs.field(factory=lambda: Watch(DirectoryStats()))
    last_viewed_at: Watch[float] = attrs.field(factory=lambda: Watch(-inf))
    batch: Watch[BatchStats] = attrs.field(factory=lambda: Watch(NOTHING_SHOWN))
    adapters: Watch[AdapterStats] = attrs.field(factory=lambda: Watch(NO_ADAPTERS))
    """Published by the `Runtime`, before an adapter is loaded."""
    ranks: Watch[RanksStats] = attrs.field(factory=lambda: Watch(RanksStats()))
    draining: Watch[bool] = attrs.field(factory=lambda: Watch(False))
    """Whether the graph was told to end, so that neither requests nor engine are at fault.
    Published by the `Runtime`."""
    intake: Watch[ActorStats] = attrs.field(factory=lambda: _actor("RequestIntake"))
    group: Watch[ActorStats] = attrs.field(
        factory=lambda: _actor("Scheduler+RankMirror+ModelStepper")
    )
    janitor: Watch[ActorStats] = attrs.field(factory=lambda: _actor("CacheJanitor"))
    writer: Watch[ActorStats] = attrs.field(factory=lambda: _actor("SSDWriter"))

    def health(self, *, draining: bool, leaving: Leaving = "") -> Health:
        status, detail = self._status(draining=draining)
        if leaving and status in ("draining", "ok"):
            doing = "put to sleep" if leaving == "asleep" else "unloaded"
            status, detail = (
                "unloading",
                f"the model is being {doing}; a request for it waits, and loads it again",
            )
        return Health(
            status=status,
            detail=detail,
            scheduler=self.stats.latest,
            memory=self.memory.latest,
            adapters=self.adapters.latest,
            directory=self.directory.latest,
            actors=tuple(
                watch.latest for watch in (self.intake, self.group, self.janitor, self.writer)
            ),
            ranks=self.ranks.latest,
        )

    def _status(self, *, draining: bool) -> tuple[Status, str]:
        group, since = self.group.latest, self.stats.latest.stalled_since
        if self.ranks.latest.lost:
            return "lost", self.ranks.latest.lost
        if draining:
            return "draining", "the server is shutting down"
        if "failed" in (group.state, self.intake.latest.state):
            return "failed", group.last_error or self.intake.latest.last_error
        if group.state != "running" or self.intake.latest.state != "running":
            return "restarting", group.last_error or self.intake.latest.last_error
        if since is not None:
            waited = trio.current_time() - since
            stuck = waited > STUCK_FACTOR * self.settings.stall_timeout_s
            return (
                "stuck" if stuck else "stalled"
            ), f"the engine has not finished a step for {waited:.0f} s"
        return "ok", ""
