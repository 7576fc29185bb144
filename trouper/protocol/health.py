"""Frozen statistics that actors publish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from trouper.protocol.histogram import INTER_TOKEN_S, STEP_TOKENS, Histogram
from trouper.protocol.kv import BankStats
from trouper.protocol.plans import ProposerName

# Empty histogram of inter-token latencies.
NO_LATENCIES = Histogram.of(INTER_TOKEN_S)
NO_STEP_TOKENS = Histogram.of(STEP_TOKENS)


MemoryPressure = Literal["unknown", "normal", "warning", "critical"]
SEVERITY: tuple[MemoryPressure, ...] = ("unknown", "normal", "warning", "critical")


@attrs.frozen(kw_only=True)
class CacheStats:
    """Counters since the start, and the cache's content."""

    hits_block: int = 0
    hits_sequence: int = 0
    """Prompts that reused part of a block, or a live row's KV."""
    hits_disk: int = 0
    """Blocks read from disk."""
    misses: int = 0
    waited: int = 0
    """Requests that waited for another's prefill."""
    queried_tokens: int = 0
    hit_tokens: int = 0
    blocks: int = 0
    snapshots: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    capacity_blocks: int = 0
    evicted_blocks: int = 0
    evicted_snapshots: int = 0
    refused: int = 0
    """Not stored, since all others were in use."""
    collisions: int = 0
    reason: str = ""


@attrs.frozen(kw_only=True)
class ProposerStats:
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0


@attrs.frozen(kw_only=True)
class SpeculationStats:
    """Counters since the start."""

    steps: int = 0
    drafts: int = 0
    """Verified drafts, one a row and step."""
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    """Acceptances by position in the draft."""
    by_proposer: Mapping[ProposerName, ProposerStats] = attrs.field(factory=dict)
    parked_s: float = 0.0
    """Seconds of steps in which rows that may draft did not."""
    reason: str = ""
    """Reason why no row can draft; "" if rows can."""


@attrs.frozen(kw_only=True)
class RecoveryStats:
    """Crashes of the engine: counters since the start, and state."""

    crashes: int = 0
    resumed: int = 0
    """Requests that resumed after a crash."""
    convicted: int = 0
    """Contents that crashed the engine while alone."""
    refused: int = 0
    """Requests refused because of such contents."""
    quarantined: int = 0
    """Refused at present."""
    apart: bool = False
    """Whether all rows run alone: a crash came only from several together."""
    allocation_failures: int = 0
    bound_bytes: int = 0
    """Bound on rows and cached blocks after a crash; 0: none."""


@attrs.frozen(kw_only=True)
class SchedulerStats:
    """Counters since the start, across restarts of the engine, and gauges."""

    active_sequences: int = 0
    queued_requests: int = 0
    preempted_sequences: int = 0
    prefilling_sequences: int = 0
    tokens_generated: int = 0
    total_prefill_tokens: int = 0
    total_cached_tokens: int = 0
    requests_completed: int = 0
    requests_errored: int = 0
    requests_withdrawn: int = 0
    total_requests: int = 0
    total_prompt_tokens: int = 0
    """Prompt tokens of all rows, including cached ones."""
    steps: int = 0
    preemptions: int = 0
    """For memory or a higher priority."""
    kv_row_bytes: int = 0
    """Maximum of running rows after the next plan."""
    kv_limit_bytes: int = 0
    """Limit on rows and cached blocks; 0: unknown."""
    banks: tuple[BankStats, ...] = ()
    """Rank 0's banks, about a second old at most."""
    stalls: int = 0
    inter_token_latency: Histogram = NO_LATENCIES
    """Seconds."""
    step_tokens: Histogram = NO_STEP_TOKENS
    cache: CacheStats = attrs.field(factory=CacheStats)
    speculation: SpeculationStats = attrs.field(factory=SpeculationStats)
    recovery: RecoveryStats = attrs.field(factory=RecoveryStats)
    stalled_since: float | None = None
    """trio.current_time() of the plan that is unanswered for too long."""


@attrs.frozen(kw_only=True)
class MemoryStatus:
    """Memory of the device, as CacheJanitor last read it."""

    active_bytes: int = 0
    spare_bytes: int = 0
    limit_bytes: int = 0
    under_pressure: bool = False
    fixed_bytes: int = 0
    """Memory besides rows, cached blocks and adapters; 0: not measured yet."""
    releases: int = 0
    pressure: MemoryPressure = "unknown"
    """The system's verdict, or "warning" where swap grows."""
    pressure_bound_bytes: int = 0
    """Bound on rows and cached blocks under pressure; 0: none."""


@attrs.frozen(kw_only=True)
class AdapterStats:
    held_bytes: int = 0
    reserved_bytes: int = 0
    """Adapters being loaded."""

    @property
    def nbytes(self) -> int:
        return self.held_bytes + self.reserved_bytes


NO_ADAPTERS = AdapterStats()


@attrs.frozen(kw_only=True)
class DirectoryStats:
    """The cache directory, as SSDWriter counts."""

    path: str = ""
    files: int = 0
    bytes: int = 0
    free_disk_bytes: int = 0
    blocks: int = 0
    swept_files: int = 0
    written_files: int = 0
    written_bytes: int = 0
    shed_writes: int = 0
    """Runs not written: no room, spent budget, faulty disk."""
    read_files: int = 0
    read_bytes: int = 0
    damaged: int = 0
    lacking: int = 0
    """Blocks and snapshots of rank 0 that another rank lacked."""
    inspected: int = 0
    attached: bool = False
    reason: str = ""
    """Reason why the directory is unused; "" if used."""


@attrs.frozen(kw_only=True)
class ActorStats:
    """One supervised actor or group."""

    name: str
    state: str = "starting"
    """One of: starting, running, restarting, degraded, failed, stopped."""
    restarts: int = 0
    last_error: str = ""


@attrs.frozen(kw_only=True)
class ChannelStats:
    """A channel of the graph."""

    name: str
    source: str
    target: str
    capacity: int
    policy: str
    """Effect of a full channel: blocks, never full, sheds."""
    used: int
    peak: int
    """Most messages that a request or reader has seen."""
    senders_waiting: int


RankState = Literal["joining", "loading", "ready", "lost", "left"]


@attrs.frozen(kw_only=True)
class RankStats:
    rank: int
    state: RankState = "joining"
    step: int = -1
    heard_at: float = 0.0
    """trio.current_time() of the rank's last message; for rank 0, the present."""
    directory: DirectoryStats | None = None


@attrs.frozen(kw_only=True)
class RanksStats:
    """The group of ranks; empty with a single rank."""

    ranks: tuple[RankStats, ...] = ()
    lost: str = ""
    """Reason why the group ended; "" while running."""
