"""Statistics that the actors publish about themselves: frozen snapshots, of which the newest
replaces the last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from trouper.protocol.histogram import Histogram
from trouper.protocol.kv import BankStats
from trouper.protocol.latency_buckets import INTER_TOKEN_S, STEP_TOKENS
from trouper.protocol.plans import ProposerName

NO_LATENCIES = Histogram.of(INTER_TOKEN_S)
"""Empty histogram of inter-token latencies."""
NO_STEP_TOKENS = Histogram.of(STEP_TOKENS)


MemoryPressure = Literal["unknown", "normal", "warning", "critical"]
SEVERITY: tuple[MemoryPressure, ...] = ("unknown", "normal", "warning", "critical")


@attrs.frozen(kw_only=True)
class CacheStats:
    """The prefix cache: counters since the server started, and what it holds now."""

    hits_block: int = 0
    """Full blocks of prompts that were in the cache."""
    hits_sequence: int = 0
    """Prompts that reused more than full blocks: part of a block, or the KV of a live row."""
    hits_disk: int = 0
    """Blocks of prompts that came from disk."""
    misses: int = 0
    """Full blocks of prompts that had to be computed."""
    waited: int = 0
    """Requests that waited for another one's prefill instead of computing the same."""
    queried_tokens: int = 0
    """Prompt tokens that were looked up in the cache."""
    hit_tokens: int = 0
    """Prompt tokens that were found in the cache and need not be computed."""
    blocks: int = 0
    snapshots: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    capacity_blocks: int = 0
    evicted_blocks: int = 0
    evicted_snapshots: int = 0
    refused: int = 0
    """Blocks and snapshots that were not stored, since all others were in use."""
    collisions: int = 0
    reason: str = ""
    """Reason why nothing is cached; "" if the cache is on."""


@attrs.frozen(kw_only=True)
class ProposerStats:
    """Drafts of one proposer: counters since the server started."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0


@attrs.frozen(kw_only=True)
class SpeculationStats:
    """Speculative decoding: counters since the server started."""

    steps: int = 0
    """Steps that verified drafts of any row."""
    drafts: int = 0
    """Drafts that were verified, one for each row and step."""
    drafted: int = 0
    """Tokens that were drafted."""
    accepted: int = 0
    """Drafted tokens that were accepted."""
    accepted_at: tuple[int, ...] = ()
    """How often the first token of a draft was accepted, the second, and so on."""
    by_proposer: Mapping[ProposerName, ProposerStats] = attrs.field(factory=dict)
    """The same counts for each proposer that has drafted."""
    parked_s: float = 0.0
    """Seconds of steps in which rows that may draft decoded without drafting."""
    reason: str = ""
    """Reason why no row can draft; "" if rows can."""


@attrs.frozen(kw_only=True)
class RecoveryStats:
    """Crashes of the engine: counters since the server started, and what holds now."""

    crashes: int = 0
    resumed: int = 0
    """Requests that had a row when the engine crashed and resumed after the restart."""
    convicted: int = 0
    """Contents that made the engine crash while they ran alone."""
    refused: int = 0
    """Requests that were refused because the same content had made the engine crash."""
    quarantined: int = 0
    """Contents that are refused at present."""
    apart: bool = False
    """Whether all rows run alone at present, because together they made the engine crash and each
    alone did not."""
    allocation_failures: int = 0
    """Crashes because the device had no memory for a step."""
    bound_bytes: int = 0
    """Bound on the bytes of rows and cached blocks after such a crash; 0: there is none."""


@attrs.frozen(kw_only=True)
class SchedulerStats:
    """Counters since the server started (they survive a restart of the engine group) and gauges of
    now."""

    active_sequences: int = 0
    queued_requests: int = 0
    preempted_sequences: int = 0
    """Sequences in the queue that had a row and left it: they wait to return."""
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
    """How often a row was preempted, since rows outgrew memory or one of a higher priority needed
    room."""
    kv_row_bytes: int = 0
    """Bytes that running rows may hold after the next plan."""
    kv_limit_bytes: int = 0
    """Limit on the bytes of rows and cached blocks; 0: none is known."""
    banks: tuple[BankStats, ...] = ()
    """Banks of the engine, of several ranks rank 0's: at most about a second old while rows run."""
    stalls: int = 0
    """Steps that took longer than --stall-timeout-s."""
    inter_token_latency: Histogram = NO_LATENCIES
    """Seconds between two output tokens of a row."""
    step_tokens: Histogram = NO_STEP_TOKENS
    """Tokens that a step prefilled and decoded."""
    cache: CacheStats = attrs.field(factory=CacheStats)
    speculation: SpeculationStats = attrs.field(factory=SpeculationStats)
    recovery: RecoveryStats = attrs.field(factory=RecoveryStats)
    stalled_since: float | None = None
    """trio.current_time() of the plan that has been unanswered for too long."""


@attrs.frozen(kw_only=True)
class MemoryStatus:
    """Memory of the device, as CacheJanitor last read it."""

    active_bytes: int = 0
    spare_bytes: int = 0
    limit_bytes: int = 0
    under_pressure: bool = False
    fixed_bytes: int = 0
    """Memory in use besides rows, cached blocks and LoRA adapters, as measured while no row ran; 0:
    not measured yet."""
    releases: int = 0
    """How often spare buffers were released to the system."""
    pressure: MemoryPressure = "unknown"
    """The system's verdict on the memory of the whole machine, or "warning" where swap grows."""
    pressure_bound_bytes: int = 0
    """Bound on rows and cached blocks that follows from that; 0: there is none."""


@attrs.frozen(kw_only=True)
class AdapterStats:
    """Memory of the LoRA adapters of a model, which come and go while it is loaded."""

    held_bytes: int = 0
    """Bytes of all adapters' matrices."""
    reserved_bytes: int = 0
    """Bytes for one that is being loaded, beside those."""

    @property
    def nbytes(self) -> int:
        return self.held_bytes + self.reserved_bytes


NO_ADAPTERS = AdapterStats()


@attrs.frozen(kw_only=True)
class DirectoryStats:
    """The cache directory: counters and gauges of SSDWriter."""

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
    """Runs of blocks that were not written: no room, write budget spent, or a faulty disk."""
    read_files: int = 0
    read_bytes: int = 0
    damaged: int = 0
    """Files that were removed because their content was damaged."""
    lacking: int = 0
    """Blocks and snapshots that rank 0 read and another rank did not have; 0 with a single rank."""
    inspected: int = 0
    attached: bool = False
    reason: str = ""
    """Reason why the directory is not in use; "" if it is."""


@attrs.frozen(kw_only=True)
class ActorStats:
    """State of one supervised actor or group."""

    name: str
    state: str = "starting"
    """One of: starting, running, restarting, degraded, failed, stopped."""
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
    """Effect of a full channel on its sender: blocks, never full, sheds."""
    used: int
    peak: int
    """Largest number of messages that an arriving request or a reader of these statistics found in
    the channel."""
    senders_waiting: int


RankState = Literal["joining", "loading", "ready", "lost", "left"]


@attrs.frozen(kw_only=True)
class RankStats:
    """One rank, as rank 0 knows it."""

    rank: int
    state: RankState = "joining"
    step: int = -1
    """Last step that the rank has answered."""
    heard_at: float = 0.0
    """trio.current_time() of the last message from the rank; for rank 0 itself, the present."""
    directory: DirectoryStats | None = None
    """A follower's own cache directory; None for rank 0."""


@attrs.frozen(kw_only=True)
class RanksStats:
    """The group of ranks; empty with a single rank."""

    ranks: tuple[RankStats, ...] = ()
    lost: str = ""
    """Reason why the group ended; "" while it runs."""
