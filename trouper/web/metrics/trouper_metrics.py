"""Metrics that only this server has: actors, channels, cache tiers, recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from trouper.protocol.capabilities import FEATURES
from trouper.protocol.health import SEVERITY, ChannelStats, ProposerStats, RankStats
from trouper.protocol.kv import BankStats
from trouper.web.metrics.metric import Kind, Labelled, ModelMetric, ModelScrape
from trouper.web.metrics.request_metrics import ModelRequestCounts


def _scheduler(kind: Kind, name: str, field: str, help: str) -> ModelMetric[ModelScrape]:
    return ModelMetric(kind, name, help, lambda seen: getattr(seen.health.scheduler, field))


def _cache(kind: Kind, name: str, field: str, help: str) -> ModelMetric[ModelScrape]:
    return ModelMetric(kind, name, help, lambda seen: getattr(seen.health.scheduler.cache, field))


def _disk(kind: Kind, name: str, field: str, help: str) -> ModelMetric[ModelScrape]:
    return ModelMetric(kind, name, help, lambda seen: getattr(seen.health.directory, field))


def _memory(kind: Kind, name: str, field: str, help: str) -> ModelMetric[ModelScrape]:
    return ModelMetric(kind, name, help, lambda seen: getattr(seen.health.memory, field))


def _recovery(kind: Kind, name: str, field: str, help: str) -> ModelMetric[ModelScrape]:
    return ModelMetric(
        kind, name, help, lambda seen: int(getattr(seen.health.scheduler.recovery, field))
    )


def _bank(name: str, of: Callable[[BankStats], float], help: str) -> ModelMetric[ModelScrape]:
    def values(seen: ModelScrape) -> Iterable[Labelled]:
        return [
            (("all" if bank.max_tokens is None else str(bank.max_tokens),), of(bank))
            for bank in seen.health.scheduler.banks
        ]

    return ModelMetric("gauge", name, help, values, ("bank",))


def _proposer(name: str, of: Callable[[ProposerStats], int], help: str) -> ModelMetric[ModelScrape]:
    def values(seen: ModelScrape) -> Iterable[Labelled]:
        return [
            ((proposer,), of(stats))
            for proposer, stats in seen.health.scheduler.speculation.by_proposer.items()
        ]

    return ModelMetric("counter", name, help, values, ("proposer",))


def _channel(
    kind: Kind, name: str, of: Callable[[ChannelStats], float], help: str
) -> ModelMetric[ModelScrape]:
    def values(seen: ModelScrape) -> Iterable[Labelled]:
        return [((channel.name,), of(channel)) for channel in seen.channels]

    return ModelMetric(kind, name, help, values, ("channel",))


def _rank(name: str, of: Callable[[RankStats, int], float], help: str) -> ModelMetric[ModelScrape]:
    def values(seen: ModelScrape) -> Iterable[Labelled]:
        ranks = seen.health.ranks.ranks
        newest = max((rank.step for rank in ranks), default=-1)
        return [((str(rank.rank),), of(rank, newest)) for rank in ranks]

    return ModelMetric("gauge", name, help, values, ("rank",))


def _silent_s(rank: RankStats, _: int) -> float:
    return max(0.0, trio.current_time() - rank.heard_at) if rank.rank else 0.0


def _stalled_s(seen: ModelScrape) -> float:
    since = seen.health.scheduler.stalled_since
    return 0.0 if since is None else trio.current_time() - since


def _restarts(seen: ModelScrape) -> Iterable[Labelled]:
    return [((actor.name,), actor.restarts) for actor in seen.health.actors]


def _running(seen: ModelScrape) -> Iterable[Labelled]:
    return [((actor.name,), int(actor.state == "running")) for actor in seen.health.actors]


def _allowed(seen: ModelScrape) -> Iterable[Labelled]:
    """Return whether each feature is enabled. A reason changes with the model and device only: few
    series."""
    capabilities = seen.runtime.model.capabilities
    return [
        ((feature, capabilities.off.get(feature, "")), int(capabilities.allows(feature)))
        for feature in FEATURES
    ]


def _problems(counts: ModelRequestCounts) -> Iterable[Labelled]:
    return [(which, count) for which, count in counts.problems.items()]


def _adapters(counts: ModelRequestCounts) -> Iterable[Labelled]:
    return [((adapter,), count) for adapter, count in counts.adapters.items()]


SERVING: tuple[ModelMetric[ModelScrape], ...] = (
    ModelMetric(
        "gauge",
        "trouper_ready",
        "1 while the model makes progress.",
        lambda seen: int(seen.health.ready),
    ),
    ModelMetric(
        "gauge",
        "trouper_rows",
        "Rows that may decode together.",
        lambda seen: seen.runtime.settings.rows,
    ),
    _scheduler(
        "gauge",
        "trouper_rows_prefilling",
        "prefilling_sequences",
        "Rows whose prompt is being computed.",
    ),
    _scheduler("counter", "trouper_steps_total", "steps", "Steps of the engine that had work."),
    _scheduler(
        "counter",
        "trouper_stalls_total",
        "stalls",
        "Steps that took longer than --stall-timeout-s.",
    ),
    ModelMetric(
        "gauge",
        "trouper_stalled_seconds",
        "How long the engine has not answered; 0 while it does.",
        _stalled_s,
    ),
    _scheduler(
        "counter",
        "trouper_prefilled_tokens_total",
        "total_prefill_tokens",
        "Tokens of prompts that were computed.",
    ),
    _scheduler(
        "counter",
        "trouper_requests_total",
        "total_requests",
        "Requests that reached the scheduler.",
    ),
    _scheduler(
        "counter",
        "trouper_requests_completed_total",
        "requests_completed",
        "Requests that were answered whole.",
    ),
    _scheduler(
        "counter",
        "trouper_requests_failed_total",
        "requests_errored",
        "Requests that the scheduler refused or failed.",
    ),
    _scheduler(
        "counter",
        "trouper_requests_withdrawn_total",
        "requests_withdrawn",
        "Requests whose client left or met a limit.",
    ),
)

DRAFTS = (
    _proposer(
        "trouper_drafts_total",
        lambda stats: stats.drafts,
        "Drafts of each proposer that were verified.",
    ),
    _proposer("trouper_draft_tokens_total", lambda stats: stats.drafted, "Tokens of those drafts."),
    _proposer(
        "trouper_draft_accepted_tokens_total",
        lambda stats: stats.accepted,
        "Tokens of them that were right.",
    ),
)

SELF_CHECK: tuple[ModelMetric[ModelScrape], ...] = (
    ModelMetric(
        "gauge",
        "trouper_feature_enabled",
        "1 if rows may do this; 0: the self-check has turned it off, for this reason.",
        _allowed,
        ("feature", "reason"),
    ),
    ModelMetric(
        "gauge",
        "trouper_self_check_seconds",
        "How long the self-check took when it last ran; 0: it never did.",
        lambda seen: seen.runtime.model.self_check.seconds,
    ),
)

ACTORS = (
    ModelMetric(
        "counter",
        "trouper_actor_restarts_total",
        "Crashes of an actor or group.",
        _restarts,
        ("actor",),
    ),
    ModelMetric(
        "gauge",
        "trouper_actor_running",
        "1 while it runs; 0: restarting, degraded or stopped.",
        _running,
        ("actor",),
    ),
    _channel(
        "gauge",
        "trouper_channel_depth",
        lambda channel: channel.used,
        "Messages that wait in a channel.",
    ),
    _channel(
        "gauge",
        "trouper_channel_depth_peak",
        lambda channel: channel.peak,
        "The most that an arriving request, or a scrape, found in it.",
    ),
    _channel(
        "gauge",
        "trouper_channel_capacity",
        lambda channel: channel.capacity,
        "Messages that it has room for.",
    ),
    _channel(
        "gauge",
        "trouper_channel_senders_waiting",
        lambda channel: channel.senders_waiting,
        "Senders that wait for room.",
    ),
)

RECOVERY: tuple[ModelMetric[ModelScrape], ...] = (
    _recovery(
        "counter",
        "trouper_engine_crashes_total",
        "crashes",
        "Crashes of the engine, after which it was restarted.",
    ),
    _recovery(
        "counter",
        "trouper_requests_resumed_total",
        "resumed",
        "Requests that were resumed after a crash of the engine.",
    ),
    _recovery(
        "counter",
        "trouper_contents_convicted_total",
        "convicted",
        "Contents of requests that crashed the engine when they ran alone.",
    ),
    _recovery(
        "gauge",
        "trouper_contents_quarantined",
        "quarantined",
        "Contents of requests that are refused at present.",
    ),
    _recovery(
        "counter",
        "trouper_requests_quarantined_total",
        "refused",
        "Requests that were refused, or ended, since their content crashes the engine.",
    ),
    _recovery(
        "gauge",
        "trouper_rows_apart",
        "apart",
        "1 while all rows run alone, since together they crash the engine.",
    ),
    _recovery(
        "counter",
        "trouper_allocation_failures_total",
        "allocation_failures",
        "Crashes of the engine because the device had no memory for a step.",
    ),
    _recovery(
        "gauge",
        "trouper_allocation_bound_bytes",
        "bound_bytes",
        "Bound on rows and cached blocks after such a crash; 0: there is none.",
    ),
)

KV: tuple[ModelMetric[ModelScrape], ...] = (
    _scheduler(
        "gauge",
        "trouper_kv_row_bytes",
        "kv_row_bytes",
        "KV that running rows may hold after the next step.",
    ),
    _scheduler(
        "gauge",
        "trouper_kv_limit_bytes",
        "kv_limit_bytes",
        "Limit that rows and cached blocks share; 0: none is known.",
    ),
    _scheduler(
        "gauge",
        "trouper_requests_preempted",
        "preempted_sequences",
        "Requests that have left their row and wait to return.",
    ),
)

BANKS: tuple[ModelMetric[ModelScrape], ...] = (
    _bank(
        "trouper_bank_rows",
        lambda bank: bank.rows,
        "Rows in a bank, by the length in tokens beyond which they leave it.",
    ),
    _bank(
        "trouper_bank_slots", lambda bank: bank.slots, "Rows that the bank's buffers have room for."
    ),
    _bank(
        "trouper_bank_capacity_tokens",
        lambda bank: bank.capacity_tokens,
        "Tokens that each of these has room for.",
    ),
    _bank(
        "trouper_bank_bytes", lambda bank: bank.bytes, "Memory of the bank's buffers, used or not."
    ),
)

MEMORY_TIER = (
    _cache("gauge", "trouper_cache_blocks", "blocks", "Blocks of the prefix cache in memory."),
    _cache(
        "gauge",
        "trouper_cache_capacity_blocks",
        "capacity_blocks",
        "Blocks that there is room for.",
    ),
    _cache(
        "gauge",
        "trouper_cache_snapshots",
        "snapshots",
        "Snapshots of recurrent and sliding-window layers in memory.",
    ),
    _cache("gauge", "trouper_cache_bytes", "bytes", "Memory of blocks and snapshots."),
    _cache("gauge", "trouper_cache_capacity_bytes", "capacity_bytes", "Memory that they may take."),
    _cache(
        "counter",
        "trouper_cache_block_hits_total",
        "hits_block",
        "Full blocks of prompts that were in memory.",
    ),
    _cache(
        "counter",
        "trouper_cache_block_misses_total",
        "misses",
        "Full blocks of prompts that had to be computed.",
    ),
    _cache(
        "counter",
        "trouper_cache_partial_hits_total",
        "hits_sequence",
        "Prompts that shared more than full blocks.",
    ),
    _cache(
        "counter",
        "trouper_cache_waits_total",
        "waited",
        "Requests that waited for another one's prefill of the same.",
    ),
    _cache(
        "counter", "trouper_cache_evicted_blocks_total", "evicted_blocks", "Blocks that made room."
    ),
    _cache(
        "counter",
        "trouper_cache_evicted_snapshots_total",
        "evicted_snapshots",
        "Snapshots that made room.",
    ),
    _cache(
        "counter",
        "trouper_cache_refused_total",
        "refused",
        "Blocks and snapshots for which there was no room.",
    ),
    _cache(
        "counter",
        "trouper_cache_collisions_total",
        "collisions",
        "Hashes that were equal where tokens were not.",
    ),
)

DISK_TIER: tuple[ModelMetric[ModelScrape], ...] = (
    _cache(
        "counter",
        "trouper_disk_block_hits_total",
        "hits_disk",
        "Blocks that were read from disk for prompts.",
    ),
    ModelMetric(
        "gauge",
        "trouper_disk_attached",
        "1 while the directory is in use.",
        lambda seen: int(seen.health.directory.attached),
    ),
    _disk("gauge", "trouper_disk_files", "files", "Files in the cache directory."),
    _disk("gauge", "trouper_disk_bytes", "bytes", "Bytes of these files."),
    _disk(
        "gauge", "trouper_disk_free_bytes", "free_disk_bytes", "Bytes that are free on that disk."
    ),
    _disk("gauge", "trouper_disk_blocks", "blocks", "Blocks and snapshots that are stored."),
    _disk(
        "counter", "trouper_disk_written_files_total", "written_files", "Files that were written."
    ),
    _disk(
        "counter", "trouper_disk_written_bytes_total", "written_bytes", "Bytes that were written."
    ),
    _disk(
        "counter",
        "trouper_disk_shed_writes_total",
        "shed_writes",
        "Runs of blocks that were not written: no room, budget spent, sick disk.",
    ),
    _disk("counter", "trouper_disk_read_files_total", "read_files", "Files that were read."),
    _disk("counter", "trouper_disk_read_bytes_total", "read_bytes", "Bytes that were read."),
    _disk(
        "counter",
        "trouper_disk_swept_files_total",
        "swept_files",
        "Files that were removed to keep within bounds.",
    ),
    _disk(
        "counter",
        "trouper_disk_damaged_files_total",
        "damaged",
        "Files that were removed since they could not be trusted.",
    ),
    _disk(
        "counter",
        "trouper_disk_lacking_total",
        "lacking",
        "Blocks and snapshots that rank 0 has read and another rank had not.",
    ),
    _disk(
        "counter",
        "trouper_disk_inspected_files_total",
        "inspected",
        "Files that were read again only to check them.",
    ),
)

MEMORY: tuple[ModelMetric[ModelScrape], ...] = (
    _memory(
        "gauge",
        "trouper_memory_active_bytes",
        "active_bytes",
        "Memory of the device that is in use.",
    ),
    ModelMetric(
        "gauge",
        "trouper_adapter_bytes",
        "Memory of the matrices of all LoRA adapters.",
        lambda seen: seen.health.adapters.held_bytes,
    ),
    _memory(
        "gauge",
        "trouper_memory_spare_bytes",
        "spare_bytes",
        "Memory that MLX keeps to use it again.",
    ),
    _memory(
        "gauge",
        "trouper_memory_limit_bytes",
        "limit_bytes",
        "Memory that the device recommends to use at most.",
    ),
    ModelMetric(
        "gauge",
        "trouper_memory_under_pressure",
        "1 while requests wait since memory is short (--memory-fraction).",
        lambda seen: int(seen.health.memory.under_pressure),
    ),
    ModelMetric(
        "gauge",
        "trouper_memory_system_pressure",
        "The system's memory pressure: 0 normal or unknown, 1 warning, 2 critical.",
        lambda seen: max(0, SEVERITY.index(seen.health.memory.pressure) - 1),
    ),
    _memory(
        "gauge",
        "trouper_memory_pressure_bound_bytes",
        "pressure_bound_bytes",
        "Bound on rows and cached blocks under that; 0: none.",
    ),
    _memory(
        "counter",
        "trouper_memory_releases_total",
        "releases",
        "How often spare memory was given back.",
    ),
)

RANKS = (
    _rank(
        "trouper_rank_ready",
        lambda rank, _: int(rank.state == "ready"),
        "1 while this rank takes part.",
    ),
    _rank(
        "trouper_rank_silent_seconds",
        _silent_s,
        "Since its last sign of life; 0 for rank 0, which tells this.",
    ),
    _rank(
        "trouper_rank_steps_behind",
        lambda rank, newest: newest - rank.step,
        "Steps that another rank has answered and it has not.",
    ),
)

TROUPER_METRICS: tuple[ModelMetric[ModelScrape], ...] = (
    *SERVING,
    *DRAFTS,
    *SELF_CHECK,
    *ACTORS,
    *RECOVERY,
    *RANKS,
    *KV,
    *BANKS,
    *MEMORY_TIER,
    *DISK_TIER,
    *MEMORY,
)
TROUPER_REQUEST_METRICS: tuple[ModelMetric[ModelRequestCounts], ...] = (
    ModelMetric(
        "counter",
        "trouper_request_problems_total",
        "Problems that ended requests: refused (before they were accepted), error, abort; by their "
        "code.",
        _problems,
        ("reason", "code"),
    ),
    ModelMetric(
        "counter",
        "trouper_adapter_requests_total",
        "Requests that have ended, by the LoRA adapter that they named (--adapter).",
        _adapters,
        ("adapter",),
    ),
    ModelMetric(
        "counter",
        "trouper_disk_hit_tokens_total",
        "Tokens of prompts that were read from disk, of requests that have ended.",
        lambda counts: counts.disk_tokens,
    ),
)
