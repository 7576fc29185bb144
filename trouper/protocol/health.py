"""Frozen statistics that actors publish. /metrics shows the fields that are a counter or a
gauge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from trouper.protocol.histogram import INTER_TOKEN_S, STEP_TOKENS, Histogram, counter, gauge
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

    hits_block: int = counter(
        "trouper_cache_block_hits_total", "Full blocks of prompts that were in memory."
    )
    hits_sequence: int = counter(
        "trouper_cache_partial_hits_total", "Prompts that shared more than full blocks."
    )
    """Prompts that reused part of a block, or a live row's KV."""
    hits_disk: int = counter(
        "trouper_disk_block_hits_total", "Blocks that were read from disk for prompts."
    )
    misses: int = counter(
        "trouper_cache_block_misses_total", "Full blocks of prompts that had to be computed."
    )
    waited: int = counter(
        "trouper_cache_waits_total", "Requests that waited for another one's prefill of the same."
    )
    queried_tokens: int = counter(
        "vllm:prefix_cache_queries_total",
        "Tokens of prompts that were looked up in the prefix cache.",
    )
    hit_tokens: int = counter(
        "vllm:prefix_cache_hits_total", "Tokens of prompts that the prefix cache had."
    )
    blocks: int = gauge("trouper_cache_blocks", "Blocks of the prefix cache in memory.")
    snapshots: int = gauge(
        "trouper_cache_snapshots", "Snapshots of recurrent and sliding-window layers in memory."
    )
    bytes: int = gauge("trouper_cache_bytes", "Memory of blocks and snapshots.")
    capacity_bytes: int = gauge("trouper_cache_capacity_bytes", "Memory that they may take.")
    capacity_blocks: int = gauge("trouper_cache_capacity_blocks", "Blocks that there is room for.")
    evicted_blocks: int = counter("trouper_cache_evicted_blocks_total", "Blocks that made room.")
    evicted_snapshots: int = counter(
        "trouper_cache_evicted_snapshots_total", "Snapshots that made room."
    )
    refused: int = counter(
        "trouper_cache_refused_total", "Blocks and snapshots for which there was no room."
    )
    """Not stored, since all others were in use."""
    collisions: int = counter(
        "trouper_cache_collisions_total", "Hashes that were equal where tokens were not."
    )
    reason: str = ""


@attrs.frozen(kw_only=True)
class ProposerStats:
    drafts: int = counter("trouper_drafts_total", "Drafts of each proposer that were verified.")
    drafted: int = counter("trouper_draft_tokens_total", "Tokens of those drafts.")
    accepted: int = counter(
        "trouper_draft_accepted_tokens_total", "Tokens of them that were right."
    )


@attrs.frozen(kw_only=True)
class SpeculationStats:
    """Counters since the start."""

    steps: int = 0
    drafts: int = counter(
        "vllm:spec_decode_num_drafts_total", "Drafts that were verified: one for each row and step."
    )
    drafted: int = counter("vllm:spec_decode_num_draft_tokens_total", "Tokens of those drafts.")
    accepted: int = counter(
        "vllm:spec_decode_num_accepted_tokens_total", "Tokens of drafts that were right."
    )
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

    crashes: int = counter(
        "trouper_engine_crashes_total", "Crashes of the engine, after which it was restarted."
    )
    resumed: int = counter(
        "trouper_requests_resumed_total", "Requests that were resumed after a crash of the engine."
    )
    convicted: int = counter(
        "trouper_contents_convicted_total",
        "Contents of requests that crashed the engine when they ran alone.",
    )
    refused: int = counter(
        "trouper_requests_quarantined_total",
        "Requests that were refused, or ended, since their content crashes the engine.",
    )
    quarantined: int = gauge(
        "trouper_contents_quarantined", "Contents of requests that are refused at present."
    )
    apart: bool = gauge(
        "trouper_rows_apart",
        "1 while all rows run alone, since together they crash the engine.",
        default=False,
    )
    allocation_failures: int = counter(
        "trouper_allocation_failures_total",
        "Crashes of the engine because the device had no memory for a step.",
    )
    bound_bytes: int = gauge(
        "trouper_allocation_bound_bytes",
        "Bound on rows and cached blocks after such a crash; 0: there is none.",
    )


@attrs.frozen(kw_only=True)
class SchedulerStats:
    """Counters since the start, across restarts of the engine, and gauges."""

    active_sequences: int = gauge(
        "vllm:num_requests_running", "Requests that have a row: they prefill or decode."
    )
    queued_requests: int = gauge("vllm:num_requests_waiting", "Requests that wait for a row.")
    preempted_sequences: int = gauge(
        "trouper_requests_preempted", "Requests that have left their row and wait to return."
    )
    prefilling_sequences: int = gauge(
        "trouper_rows_prefilling", "Rows whose prompt is being computed."
    )
    tokens_generated: int = counter("vllm:generation_tokens_total", "Tokens that were generated.")
    total_prefill_tokens: int = counter(
        "trouper_prefilled_tokens_total", "Tokens of prompts that were computed."
    )
    total_cached_tokens: int = counter(
        "vllm:prompt_tokens_cached_total", "Tokens of these that need not be computed."
    )
    requests_completed: int = counter(
        "trouper_requests_completed_total", "Requests that were answered whole."
    )
    requests_errored: int = counter(
        "trouper_requests_failed_total", "Requests that the scheduler refused or failed."
    )
    requests_withdrawn: int = counter(
        "trouper_requests_withdrawn_total", "Requests whose client left or met a limit."
    )
    total_requests: int = counter("trouper_requests_total", "Requests that reached the scheduler.")
    total_prompt_tokens: int = counter(
        "vllm:prompt_tokens_total", "Tokens of prompts that got a row, cached ones among them."
    )
    steps: int = counter("trouper_steps_total", "Steps of the engine that had work.")
    step_seconds: float = counter(
        "trouper_step_seconds_total",
        "Seconds that these steps took; the rate is the share of time in which the engine works.",
        default=0.0,
    )
    shared_steps: int = counter(
        "trouper_shared_steps_total", "Steps that decoded and also prefilled."
    )
    shared_step_seconds: float = counter(
        "trouper_shared_step_seconds_total",
        "Seconds that these steps took: pauses that prefill puts between a stream's tokens.",
        default=0.0,
    )
    shared_step_bound_s: float = gauge(
        "trouper_shared_step_bound_seconds",
        "Seconds that such a step should take: 0.75 to 0.95 of --decode-stall-ms, more where steps "
        "are even, or twice what decoding alone takes if that is more.",
        default=0.0,
    )
    decode_step_s: float = gauge(
        "trouper_decode_step_seconds",
        "Seconds of a step that only decodes: median of the last 3.",
        default=0.0,
    )
    images_decoded: int = counter(
        "trouper_images_decoded_total", "Images whose pixels were decoded for the encoder."
    )
    image_decoder_seconds: float = counter(
        "trouper_image_decoder_seconds_total",
        "Seconds in which ImageDecoder decoded images, damaged ones too.",
        default=0.0,
    )
    images_encoded: int = counter("trouper_images_encoded_total", "Images that were encoded.")
    encoder_seconds: float = counter(
        "trouper_encoder_seconds_total", "Seconds of steps that encoded images.", default=0.0
    )
    image_cache_bytes: int = gauge(
        "trouper_image_cache_bytes", "Bytes of encoded images that the engine holds."
    )
    preemptions: int = counter(
        "vllm:num_preemptions_total",
        "Rows that left the batch since memory was full, or for a request of a higher priority; "
        "they go on later.",
    )
    kv_row_bytes: int = gauge(
        "trouper_kv_row_bytes", "KV that running rows may hold after the next step."
    )
    kv_limit_bytes: int = gauge(
        "trouper_kv_limit_bytes", "Limit that rows and cached blocks share; 0: none is known."
    )
    banks: tuple[BankStats, ...] = ()
    """Rank 0's banks, about a second old at most."""
    stalls: int = counter("trouper_stalls_total", "Steps that took longer than --stall-timeout-s.")
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

    active_bytes: int = gauge("trouper_memory_active_bytes", "Memory of the device that is in use.")
    spare_bytes: int = gauge("trouper_memory_spare_bytes", "Memory that MLX keeps to use it again.")
    limit_bytes: int = gauge(
        "trouper_memory_limit_bytes", "Memory that the device recommends to use at most."
    )
    under_pressure: bool = gauge(
        "trouper_memory_under_pressure",
        "1 while requests wait since memory is short (--memory-fraction).",
        default=False,
    )
    fixed_bytes: int = 0
    """Memory besides rows, cached blocks and adapters; 0: not measured yet."""
    releases: int = counter(
        "trouper_memory_releases_total", "How often spare memory was given back."
    )
    pressure: MemoryPressure = "unknown"
    """The system's verdict, or "warning" where swap grows."""
    pressure_bound_bytes: int = gauge(
        "trouper_memory_pressure_bound_bytes",
        "Bound on rows and cached blocks under that; 0: none.",
    )


@attrs.frozen(kw_only=True)
class AdapterStats:
    held_bytes: int = gauge("trouper_adapter_bytes", "Memory of the matrices of all LoRA adapters.")
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
    files: int = gauge("trouper_disk_files", "Files in the cache directory.")
    bytes: int = gauge("trouper_disk_bytes", "Bytes of these files.")
    free_disk_bytes: int = gauge("trouper_disk_free_bytes", "Bytes that are free on that disk.")
    blocks: int = gauge("trouper_disk_blocks", "Blocks and snapshots that are stored.")
    swept_files: int = counter(
        "trouper_disk_swept_files_total", "Files that were removed to keep within bounds."
    )
    written_files: int = counter("trouper_disk_written_files_total", "Files that were written.")
    written_bytes: int = counter("trouper_disk_written_bytes_total", "Bytes that were written.")
    shed_writes: int = counter(
        "trouper_disk_shed_writes_total",
        "Runs of blocks that were not written: no room, budget spent, sick disk.",
    )
    read_files: int = counter("trouper_disk_read_files_total", "Files that were read.")
    read_bytes: int = counter("trouper_disk_read_bytes_total", "Bytes that were read.")
    damaged: int = counter(
        "trouper_disk_damaged_files_total",
        "Files that were removed since they could not be trusted.",
    )
    lacking: int = counter(
        "trouper_disk_lacking_total",
        "Blocks and snapshots that rank 0 has read and another rank had not.",
    )
    inspected: int = counter(
        "trouper_disk_inspected_files_total", "Files that were read again only to check them."
    )
    attached: bool = gauge(
        "trouper_disk_attached", "1 while the directory is in use.", default=False
    )
    reason: str = ""
    """Reason why the directory is unused; "" if used."""


@attrs.frozen(kw_only=True)
class ActorStats:
    """One supervised actor or group."""

    name: str
    state: str = "starting"
    """One of: starting, running, restarting, degraded, failed, stopped."""
    restarts: int = counter("trouper_actor_restarts_total", "Crashes of an actor or group.")
    last_error: str = ""


@attrs.frozen(kw_only=True)
class ChannelStats:
    """A channel of the graph."""

    name: str
    source: str
    target: str
    capacity: int = gauge(
        "trouper_channel_capacity", "Messages that it has room for.", default=attrs.NOTHING
    )
    policy: str
    """Effect of a full channel: blocks, never full, sheds."""
    used: int = gauge(
        "trouper_channel_depth", "Messages that wait in a channel.", default=attrs.NOTHING
    )
    peak: int = gauge(
        "trouper_channel_depth_peak",
        "The most that an arriving request, or a scrape, found in it.",
        default=attrs.NOTHING,
    )
    """Most messages that a request or reader has seen."""
    senders_waiting: int = gauge(
        "trouper_channel_senders_waiting", "Senders that wait for room.", default=attrs.NOTHING
    )


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
