"""Metrics as vLLM has them, for its dashboards and routers."""

from __future__ import annotations

from collections.abc import Iterable

from trouper.web.metrics.metric import Labelled, ModelMetric, ModelScrape
from trouper.web.metrics.request_metrics import MEASURES, Measure, ModelRequestCounts


def _kv_used(seen: ModelScrape) -> float:
    """Share of the KV memory that rows hold, which may exceed 1 for a single row. Without a limit:
    share of the rows."""
    stats = seen.health.scheduler
    if stats.kv_limit_bytes:
        return min(1.0, stats.kv_row_bytes / stats.kv_limit_bytes)
    return stats.active_sequences / seen.runtime.settings.rows


def _reasons(counts: ModelRequestCounts) -> Iterable[Labelled]:
    return [((reason,), count) for reason, count in counts.reasons.items()]


def _sources(seen: ModelScrape) -> Iterable[Labelled]:
    stats = seen.health.scheduler
    cached = stats.total_cached_tokens
    return [
        (("local_compute",), stats.total_prompt_tokens - cached),
        (("local_cache_hit",), cached),
    ]


def _cache_config(seen: ModelScrape) -> Iterable[Labelled]:
    cache, settings = seen.health.scheduler.cache, seen.runtime.settings
    cached = "False" if cache.reason else "True"
    dtype = f"int{settings.kv_bits}" if settings.kv_bits else "auto"
    return [((str(settings.block_size), dtype, cached, str(cache.capacity_blocks)), 1)]


def _accepted_at(seen: ModelScrape) -> Iterable[Labelled]:
    return [
        ((str(position),), count)
        for position, count in enumerate(seen.health.scheduler.speculation.accepted_at)
    ]


def _histogram(measure: Measure) -> ModelMetric[ModelRequestCounts]:
    return ModelMetric(
        "histogram", measure.name, measure.help, lambda counts: counts.histograms[measure.name]
    )


VLLM_METRICS: tuple[ModelMetric[ModelScrape], ...] = (
    ModelMetric(
        "gauge",
        "vllm:num_requests_running",
        "Requests that have a row: they prefill or decode.",
        lambda seen: seen.health.scheduler.active_sequences,
    ),
    ModelMetric(
        "gauge",
        "vllm:num_requests_waiting",
        "Requests that wait for a row.",
        lambda seen: seen.health.scheduler.queued_requests,
    ),
    ModelMetric(
        "gauge",
        "vllm:kv_cache_usage_perc",
        "KV of running requests, as a part of the KV memory (--kv-memory); of the rows, if no "
        "limit is known. 1: requests wait or are "
        "preempted. What is only cached does not count.",
        _kv_used,
    ),
    ModelMetric(
        "gauge",
        "vllm:cache_config_info",
        "How keys and values are cached.",
        _cache_config,
        ("block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks"),
    ),
    ModelMetric(
        "counter",
        "vllm:prefix_cache_queries_total",
        "Tokens of prompts that were looked up in the prefix cache.",
        lambda seen: seen.health.scheduler.cache.queried_tokens,
    ),
    ModelMetric(
        "counter",
        "vllm:prefix_cache_hits_total",
        "Tokens of prompts that the prefix cache had.",
        lambda seen: seen.health.scheduler.cache.hit_tokens,
    ),
    ModelMetric(
        "counter",
        "vllm:spec_decode_num_drafts_total",
        "Drafts that were verified: one for each row and step.",
        lambda seen: seen.health.scheduler.speculation.drafts,
    ),
    ModelMetric(
        "counter",
        "vllm:spec_decode_num_draft_tokens_total",
        "Tokens of those drafts.",
        lambda seen: seen.health.scheduler.speculation.drafted,
    ),
    ModelMetric(
        "counter",
        "vllm:spec_decode_num_accepted_tokens_total",
        "Tokens of drafts that were right.",
        lambda seen: seen.health.scheduler.speculation.accepted,
    ),
    ModelMetric(
        "counter",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "The same by their place in the draft.",
        _accepted_at,
        ("position",),
    ),
    ModelMetric(
        "counter",
        "vllm:num_preemptions_total",
        "Rows that left the batch since memory was full, or for a request of a higher priority; "
        "they go on later.",
        lambda seen: seen.health.scheduler.preemptions,
    ),
    ModelMetric(
        "counter",
        "vllm:prompt_tokens_total",
        "Tokens of prompts that got a row, cached ones among them.",
        lambda seen: seen.health.scheduler.total_prompt_tokens,
    ),
    ModelMetric(
        "counter",
        "vllm:prompt_tokens_cached_total",
        "Tokens of these that need not be computed.",
        lambda seen: seen.health.scheduler.total_cached_tokens,
    ),
    ModelMetric(
        "counter",
        "vllm:prompt_tokens_by_source_total",
        "The same tokens: computed (local_compute), or from a cache in memory or on disk "
        "(local_cache_hit).",
        _sources,
        ("source",),
    ),
    ModelMetric(
        "counter",
        "vllm:generation_tokens_total",
        "Tokens that were generated.",
        lambda seen: seen.health.scheduler.tokens_generated,
    ),
    ModelMetric(
        "histogram",
        "vllm:inter_token_latency_seconds",
        "Between two tokens of a row.",
        lambda seen: seen.health.scheduler.inter_token_latency,
    ),
    ModelMetric(
        "histogram",
        "vllm:time_per_output_token_seconds",
        "The same by its older name, which dashboards still ask for.",
        lambda seen: seen.health.scheduler.inter_token_latency,
    ),
    ModelMetric(
        "histogram",
        "vllm:iteration_tokens_total",
        "Tokens that a step prefilled and decoded.",
        lambda seen: seen.health.scheduler.step_tokens,
    ),
)
VLLM_REQUEST_METRICS: tuple[ModelMetric[ModelRequestCounts], ...] = (
    ModelMetric(
        "counter",
        "vllm:request_success_total",
        "Requests that were accepted and have ended: stop, length, abort (the client left or "
        "cancelled), error.",
        _reasons,
        ("finished_reason",),
    ),
    *map(_histogram, MEASURES),
)
