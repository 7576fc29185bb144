"""Metrics of a model: fields of statistics that are figures, and figures that are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import attrs
import trio
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from trouper.actors.runtime.channels import Health
from trouper.actors.runtime.runtime import Runtime
from trouper.protocol.capabilities import FEATURES, IMAGE_FEATURES
from trouper.protocol.health import (
    SEVERITY,
    ActorStats,
    AdapterStats,
    CacheStats,
    ChannelStats,
    DirectoryStats,
    MemoryStatus,
    ProposerStats,
    RankStats,
    RecoveryStats,
    SchedulerStats,
    SpeculationStats,
)
from trouper.protocol.histogram import METRIC, Histogram
from trouper.protocol.kv import BankStats
from trouper.web.metrics.request_metrics import MEASURES, Measure, ModelRequestCounts

Value = float | Histogram
Kind = Literal["gauge", "counter", "histogram"]
Labelled = tuple[tuple[str, ...], Value]
Source = TypeVar("Source")


@attrs.frozen
class ModelScrape:
    runtime: Runtime
    health: Health
    channels: tuple[ChannelStats, ...]


# Where vLLM has a metric of the same meaning, name, labels and buckets are vLLM's, for dashboards
# and routers.
@attrs.frozen
class MetricFamily(Generic[Source]):
    """A metric: kind, name, help, how it is read from a source, and its labels. `name` as
    Prometheus shows it, with `_total`."""

    kind: Kind
    name: str
    help: str
    of: Callable[[Source], Value | Iterable[Labelled]]
    labels: tuple[str, ...] = ()

    def values(self, source: Source) -> Iterable[Labelled]:
        read = self.of(source)
        return [((), read)] if isinstance(read, int | float | Histogram) else read

    def family(self, source: Source) -> Metric:
        if self.kind == "histogram":
            histogram = HistogramMetricFamily(self.name, self.help, labels=self.labels)
            for labels, value in self.values(source):
                assert isinstance(value, Histogram)
                buckets = [(_bound(bound), count) for bound, count in value.buckets]
                histogram.add_metric(labels, buckets, value.total)
            return histogram
        kind = GaugeMetricFamily if self.kind == "gauge" else CounterMetricFamily
        family = kind(self.name, self.help, labels=self.labels)
        for labels, value in self.values(source):
            assert not isinstance(value, Histogram)
            family.add_metric(labels, value)
        return family


def of_each_model(metric: MetricFamily[Source]) -> MetricFamily[Iterable[tuple[str, Source]]]:
    """Return a model's metric as one of all models, with their labels. vLLM numbers engines; a
    model has one here."""
    names, engine = (
        (("model_name", "engine"), ("0",))
        if metric.name.startswith("vllm:")
        else (("model_name",), ())
    )

    def values(sources: Iterable[tuple[str, Source]]) -> Iterable[Labelled]:
        for model, source in sources:
            for labels, value in metric.values(source):
                yield (model, *engine, *labels), value

    return MetricFamily(metric.kind, metric.name, metric.help, values, names + metric.labels)


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(float(bound))


Statistics = Callable[[ModelScrape], Iterable[tuple[tuple[str, ...], Any]]]
"""Reads a model's statistics of one class, each with the values of the labels."""


def declared(
    kind: type[attrs.AttrsInstance], of: Statistics, labels: tuple[str, ...] = ()
) -> tuple[MetricFamily[ModelScrape], ...]:
    """Return the metrics of the class's fields that are figures."""

    def values(field: str, seen: ModelScrape) -> Iterable[Labelled]:
        return [(own, getattr(statistics, field)) for own, statistics in of(seen)]

    return tuple(
        MetricFamily(shape, name, description, partial(values, field.name), labels)
        for field in attrs.fields(kind)
        if METRIC in field.metadata
        for shape, name, description in [field.metadata[METRIC]]
    )


def _banks(seen: ModelScrape) -> Iterable[tuple[tuple[str, ...], BankStats]]:
    return [
        (("all" if bank.max_tokens is None else str(bank.max_tokens),), bank)
        for bank in seen.health.scheduler.banks
    ]


def _proposers(seen: ModelScrape) -> Iterable[tuple[tuple[str, ...], ProposerStats]]:
    by_proposer = seen.health.scheduler.speculation.by_proposer
    return [((proposer,), stats) for proposer, stats in by_proposer.items()]


BANKS = declared(BankStats, _banks, ("bank",))
DRAFTS = declared(ProposerStats, _proposers, ("proposer",))
FIGURES = (
    *declared(SchedulerStats, lambda seen: [((), seen.health.scheduler)]),
    *declared(CacheStats, lambda seen: [((), seen.health.scheduler.cache)]),
    *declared(SpeculationStats, lambda seen: [((), seen.health.scheduler.speculation)]),
    *declared(RecoveryStats, lambda seen: [((), seen.health.scheduler.recovery)]),
    *declared(MemoryStatus, lambda seen: [((), seen.health.memory)]),
    *declared(AdapterStats, lambda seen: [((), seen.health.adapters)]),
    *declared(DirectoryStats, lambda seen: [((), seen.health.directory)]),
    *declared(
        ActorStats,
        lambda seen: [((actor.name,), actor) for actor in seen.health.actors],
        ("actor",),
    ),
    *declared(
        ChannelStats,
        lambda seen: [((channel.name,), channel) for channel in seen.channels],
        ("channel",),
    ),
    *BANKS,
    *DRAFTS,
)


# -- computed ------------------------------------------------------------------------------------


def _rank(name: str, of: Callable[[RankStats, int], float], help: str) -> MetricFamily[ModelScrape]:
    """`of`: gets a rank and the newest step of any rank."""

    def values(seen: ModelScrape) -> Iterable[Labelled]:
        ranks = seen.health.ranks.ranks
        newest = max((rank.step for rank in ranks), default=-1)
        return [((str(rank.rank),), of(rank, newest)) for rank in ranks]

    return MetricFamily("gauge", name, help, values, ("rank",))


def _silent_s(rank: RankStats, _: int) -> float:
    return max(0.0, trio.current_time() - rank.heard_at) if rank.rank else 0.0


def _stalled_s(seen: ModelScrape) -> float:
    since = seen.health.scheduler.stalled_since
    return 0.0 if since is None else trio.current_time() - since


def _running(seen: ModelScrape) -> Iterable[Labelled]:
    return [((actor.name,), int(actor.state == "running")) for actor in seen.health.actors]


def _allowed(seen: ModelScrape) -> Iterable[Labelled]:
    """Return whether each feature is enabled, with the reason."""
    card = seen.runtime.model
    capabilities, images = card.capabilities, card.images is not None
    features = FEATURES + (IMAGE_FEATURES if images or not capabilities.allows("images") else ())
    return [
        ((feature, capabilities.off.get(feature, "")), int(capabilities.allows(feature)))
        for feature in features
    ]


def _kv_used(seen: ModelScrape) -> float:
    """Share of the KV memory that rows hold, which may exceed 1 for a single row. Without a limit:
    share of the rows."""
    stats = seen.health.scheduler
    if stats.kv_limit_bytes:
        return min(1.0, stats.kv_row_bytes / stats.kv_limit_bytes)
    return stats.active_sequences / seen.runtime.settings.rows


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
MODEL_METRICS: tuple[MetricFamily[ModelScrape], ...] = (
    *FIGURES,
    *RANKS,
    MetricFamily(
        "gauge",
        "trouper_ready",
        "1 while the model makes progress.",
        lambda seen: int(seen.health.ready),
    ),
    MetricFamily(
        "gauge",
        "trouper_rows",
        "Rows that may decode together.",
        lambda seen: seen.runtime.settings.rows,
    ),
    MetricFamily(
        "gauge",
        "trouper_stalled_seconds",
        "How long the engine has not answered; 0 while it does.",
        _stalled_s,
    ),
    MetricFamily(
        "gauge",
        "trouper_feature_enabled",
        "1 if rows may do this; 0: the self-check has turned it off, for this reason.",
        _allowed,
        ("feature", "reason"),
    ),
    MetricFamily(
        "gauge",
        "trouper_self_check_seconds",
        "How long the self-check took when it last ran; 0: it never did.",
        lambda seen: seen.runtime.model.self_check.seconds,
    ),
    MetricFamily(
        "gauge",
        "trouper_actor_running",
        "1 while it runs; 0: restarting, degraded or stopped.",
        _running,
        ("actor",),
    ),
    MetricFamily(
        "gauge",
        "trouper_memory_system_pressure",
        "The system's memory pressure: 0 normal or unknown, 1 warning, 2 critical.",
        lambda seen: max(0, SEVERITY.index(seen.health.memory.pressure) - 1),
    ),
    MetricFamily(
        "gauge",
        "vllm:kv_cache_usage_perc",
        "KV of running requests, as a part of the KV memory (--kv-memory); of the rows, if no "
        "limit is known. 1: requests wait or are preempted. What is only cached does not count.",
        _kv_used,
    ),
    MetricFamily(
        "gauge",
        "vllm:cache_config_info",
        "How keys and values are cached.",
        _cache_config,
        ("block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks"),
    ),
    MetricFamily(
        "counter",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "The same by their place in the draft.",
        _accepted_at,
        ("position",),
    ),
    MetricFamily(
        "counter",
        "vllm:prompt_tokens_by_source_total",
        "The same tokens: computed (local_compute), or from a cache in memory or on disk "
        "(local_cache_hit).",
        _sources,
        ("source",),
    ),
    MetricFamily(
        "histogram",
        "vllm:inter_token_latency_seconds",
        "Between two tokens of a row.",
        lambda seen: seen.health.scheduler.inter_token_latency,
    ),
    MetricFamily(
        "histogram",
        "vllm:time_per_output_token_seconds",
        "The same by its older name, which dashboards still ask for.",
        lambda seen: seen.health.scheduler.inter_token_latency,
    ),
    MetricFamily(
        "histogram",
        "vllm:iteration_tokens_total",
        "Tokens that a step prefilled and decoded.",
        lambda seen: seen.health.scheduler.step_tokens,
    ),
)


# -- of requests that have ended -----------------------------------------------------------------


def _histogram(measure: Measure) -> MetricFamily[ModelRequestCounts]:
    return MetricFamily(
        "histogram", measure.name, measure.help, lambda counts: counts.histograms[measure.name]
    )


REQUEST_METRICS: tuple[MetricFamily[ModelRequestCounts], ...] = (
    *map(_histogram, MEASURES),
    MetricFamily(
        "counter",
        "vllm:request_success_total",
        "Requests that were accepted and have ended: stop, length, abort (the client left or "
        "cancelled), error.",
        lambda counts: [((reason,), count) for reason, count in counts.reasons.items()],
        ("finished_reason",),
    ),
    MetricFamily(
        "counter",
        "trouper_request_problems_total",
        "Problems that ended requests: refused (before they were accepted), error, abort; by their "
        "code.",
        lambda counts: counts.problems.items(),
        ("reason", "code"),
    ),
    MetricFamily(
        "counter",
        "trouper_adapter_requests_total",
        "Requests that have ended, by the LoRA adapter that they named (--adapter).",
        lambda counts: [((adapter,), count) for adapter, count in counts.adapters.items()],
        ("adapter",),
    ),
    MetricFamily(
        "counter",
        "trouper_disk_hit_tokens_total",
        "Tokens of prompts that were read from disk, of requests that have ended.",
        lambda counts: counts.disk_tokens,
    ),
)
"""Counted from the request log."""
