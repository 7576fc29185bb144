"""What the actors publish about themselves: frozen snapshots, the newest replaces the last."""

from __future__ import annotations

from typing import Literal

import attrs

from trouper.protocol.histogram import Histogram

NO_GAPS = Histogram.of(
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0
)
"""vLLM's buckets, so that its dashboards fit."""
NO_STEPS = Histogram.of(1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@attrs.frozen(kw_only=True)
class CacheStats:
    """The prefix cache: counters since the server started, and what it holds now."""

    hits_block: int = 0
    """Full blocks of prompts that were there."""
    hits_sequence: int = 0
    """Prompts that used more than full blocks: part of one, or what a live row had."""
    hits_disk: int = 0
    """Blocks of prompts that came from disk."""
    misses: int = 0
    """Full blocks of prompts that had to be computed."""
    waited: int = 0
    """Requests that waited for another one's prefill instead of computing the same."""
    queried_tokens: int = 0
    """Of prompts that were looked up,"""
    hit_tokens: int = 0
    """and of these, those that need not be computed."""
    blocks: int = 0
    snapshots: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    capacity_blocks: int = 0
    evicted_blocks: int = 0
    evicted_snapshots: int = 0
    refused: int = 0
    """Blocks and snapshots that were not kept, since all others were in use."""
    collisions: int = 0
    reason: str = ""
    """Why nothing is cached, if nothing is."""


@attrs.frozen(kw_only=True)
class SpeculationStats:
    """Drafts: counters since the server started."""

    steps: int = 0
    """That verified drafts of any row."""
    drafts: int = 0
    """One for each row and step."""
    drafted: int = 0
    """Tokens,"""
    accepted: int = 0
    """and of these, those that were right."""
    accepted_at: tuple[int, ...] = ()
    """How often a draft's first token was right, its second, and so on."""
    parked_s: float = 0.0
    """Seconds of steps in which rows decoded that may draft, and none was to."""
    reason: str = ""
    """Why no row drafts, if none can."""


@attrs.frozen(kw_only=True)
class RecoveryStats:
    """Crashes of the engine: counters since the server started, and what holds now."""

    crashes: int = 0
    resumed: int = 0
    """Requests that had a row when the engine crashed, and were taken up again after the restart."""
    convicted: int = 0
    """Contents that made the engine crash alone."""
    refused: int = 0
    """Requests that were refused since the same content made the engine crash before."""
    quarantined: int = 0
    """Contents that are refused at present."""
    apart: bool = False
    """All rows run alone at present: together they made the engine crash, and each alone did not."""


@attrs.frozen(kw_only=True)
class SchedulerStats:
    """Counters since the server started (they survive a restart of the engine group) and gauges of now."""

    active_sequences: int = 0
    queued_requests: int = 0
    prefilling_sequences: int = 0
    tokens_generated: int = 0
    total_prefill_tokens: int = 0
    total_cached_tokens: int = 0
    requests_completed: int = 0
    requests_errored: int = 0
    requests_withdrawn: int = 0
    total_requests: int = 0
    total_prompt_tokens: int = 0
    """Of rows, cached ones among them."""
    steps: int = 0
    stalls: int = 0
    """Steps that took longer than --stall-timeout-s."""
    gaps: Histogram = NO_GAPS
    """Seconds between two tokens of a row."""
    step_tokens: Histogram = NO_STEPS
    """Tokens that a step prefilled and decoded."""
    cache: CacheStats = attrs.field(factory=CacheStats)
    speculation: SpeculationStats = attrs.field(factory=SpeculationStats)
    recovery: RecoveryStats = attrs.field(factory=RecoveryStats)
    stalled_since: float | None = None
    """trio.current_time() of the plan that has been unanswered for too long."""


@attrs.frozen(kw_only=True)
class MemoryStatus:
    """What CacheJanitor last saw."""

    active_bytes: int = 0
    spare_bytes: int = 0
    limit_bytes: int = 0
    under_pressure: bool = False
    releases: int = 0
    """How often spare buffers were given back."""


@attrs.frozen(kw_only=True)
class DirectoryStats:
    """What SSDWriter knows of the cache directory."""

    path: str = ""
    files: int = 0
    bytes: int = 0
    free_disk_bytes: int = 0
    blocks: int = 0
    """Blocks and snapshots that are stored, and found again after a restart."""
    swept_files: int = 0
    written_files: int = 0
    written_bytes: int = 0
    shed_writes: int = 0
    """Runs of blocks that were not written: no room, budget spent, sick disk."""
    read_files: int = 0
    read_bytes: int = 0
    damaged: int = 0
    """Files that were removed since they could not be trusted."""
    lacking: int = 0
    """With several ranks: blocks and snapshots that rank 0 has read and another rank had not."""
    inspected: int = 0
    attached: bool = False
    reason: str = ""
    """Why the directory is not in use, if it is not."""


@attrs.frozen(kw_only=True)
class ActorStats:
    """What supervision knows of one actor or group."""

    name: str
    state: str = "starting"
    """starting, running, restarting, degraded, stopped."""
    restarts: int = 0
    last_error: str = ""


@attrs.frozen(kw_only=True)
class ChannelStats:
    """A channel of the graph at one moment."""

    name: str
    source: str
    target: str
    capacity: int
    policy: str
    """What becomes of a message when it is full: blocks, never full, sheds."""
    used: int
    peak: int
    """The most that an arriving request, or anybody who looked, found in it."""
    senders_waiting: int


RankState = Literal["joining", "loading", "ready", "lost", "left"]


@attrs.frozen(kw_only=True)
class RankStats:
    """One rank, as rank 0 knows it."""

    rank: int
    state: RankState = "joining"
    step: int = -1
    """The last that it has answered."""
    heard_at: float = 0.0
    """trio.current_time() of its last sign of life; rank 0's own is now."""
    directory: DirectoryStats | None = None
    """Of a follower: its own part of the cache on disk."""


@attrs.frozen(kw_only=True)
class RanksStats:
    """The group; nothing of it when there is only one rank."""

    ranks: tuple[RankStats, ...] = ()
    lost: str = ""
    """Why the group ends, once it does."""
