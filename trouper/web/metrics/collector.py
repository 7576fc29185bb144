"""GET /metrics, from statistics that the actors publish anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import trio
from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import ModelEntry
from trouper.protocol.version import VERSION
from trouper.web.keys.key_limits import KeyAccount
from trouper.web.metrics.model_metrics import (
    MODEL_METRICS,
    REQUEST_METRICS,
    Labelled,
    MetricFamily,
    ModelScrape,
    Value,
    of_each_model,
)
from trouper.web.metrics.request_metrics import RequestCounts
from trouper.web.observability.request_log import IgnoredNames, MalformedCalls


def _of_keys(field: str) -> Callable[[Metrics], Iterator[Labelled]]:
    return lambda metrics: (
        ((account.key.label, model), getattr(used, field))
        for account in metrics.accounts()
        for model, used in sorted(account.usage.items())
    )


def _refused(metrics: Metrics) -> Iterator[Labelled]:
    return (
        ((account.key.label, code), count)
        for account in metrics.accounts()
        for code, count in sorted(account.refused.items())
    )


def _of_batches(
    read: Callable[[Mapping[str, Any]], Value | Mapping[str, int]],
) -> Callable[[Metrics], Value | Iterable[Labelled]]:
    def values(metrics: Metrics) -> Value | Iterable[Labelled]:
        health = metrics.batches()
        value = () if health is None else read(health)
        if isinstance(value, Mapping):
            return [((label,), count) for label, count in value.items()]
        return value

    return values


KEY_METRICS: tuple[MetricFamily[Metrics], ...] = (
    *(
        MetricFamily(
            "counter", f"trouper_key_{name}_total", text, _of_keys(name), ("key", "model_name")
        )
        for name, text in (
            ("requests", "Requests of a key that were let in."),
            ("prompt_tokens", "Tokens of its prompts, cached ones among them."),
            ("cached_tokens", "Tokens of these that need not be computed."),
            ("completion_tokens", "Tokens of its answers."),
        )
    ),
    MetricFamily(
        "counter",
        "trouper_key_refused_total",
        "Requests of a key that were answered 429, by the error's code.",
        _refused,
        ("key", "code"),
    ),
)
SERVER_METRICS: tuple[MetricFamily[Metrics], ...] = (
    MetricFamily(
        "gauge",
        "trouper_model_loaded",
        "1 while the model can be asked.",
        lambda metrics: (
            ((entry.names[0],), int(entry.state == "ready")) for entry in metrics.listed()
        ),
        ("model_name",),
    ),
    MetricFamily(
        "gauge",
        "trouper_model_requests_waiting",
        "Requests that wait for the model to be loaded, or for room for it.",
        lambda metrics: (((entry.names[0],), entry.waiting) for entry in metrics.listed()),
        ("model_name",),
    ),
    MetricFamily(
        "gauge",
        "trouper_build_info",
        "Which version serves.",
        lambda _: [((VERSION,), 1)],
        ("version",),
    ),
    MetricFamily(
        "gauge",
        "trouper_tasks",
        "Tasks of the event loop: actors, connections, requests.",
        lambda _: trio.lowlevel.current_statistics().tasks_living,
    ),
    MetricFamily(
        "counter",
        "trouper_http_responses_total",
        "Responses, by the endpoint and the status that they began with.",
        lambda metrics: metrics.responses.items(),
        ("method", "path", "status"),
    ),
    MetricFamily(
        "counter",
        "trouper_ignored_parameters_total",
        "Requests that were read past a parameter or a key of a message, by its name.",
        lambda metrics: (((name,), count) for name, count in metrics.ignored.counts.items()),
        ("name",),
    ),
    MetricFamily(
        "counter",
        "trouper_malformed_calls_total",
        "Calls that the model did not write as its format has them: repaired, or no_call (given "
        "as text).",
        lambda metrics: metrics.malformed_calls.counts.items(),
        ("model_name", "outcome"),
    ),
    *KEY_METRICS,
    MetricFamily(
        "gauge",
        "trouper_batches",
        "Batches, by their status.",
        _of_batches(lambda health: health["statuses"]),
        ("status",),
    ),
    MetricFamily(
        "gauge",
        "trouper_batch_requests_running",
        "Requests of batches that run.",
        _of_batches(lambda health: health["requests_running"]),
    ),
    MetricFamily(
        "counter",
        "trouper_batch_requests_total",
        "Requests of batches that were answered (completed), answered with an error (failed), or "
        "have to run again (again).",
        _of_batches(lambda health: health["requests"]),
        ("outcome",),
    ),
    MetricFamily(
        "gauge",
        "trouper_batch_bytes",
        "Bytes of files and batches on disk.",
        _of_batches(lambda health: health["bytes"]),
    ),
)
OF_MODELS = tuple(map(of_each_model, MODEL_METRICS))
OF_REQUESTS = tuple(map(of_each_model, REQUEST_METRICS))
ALL: tuple[MetricFamily[Any], ...] = (*OF_MODELS, *OF_REQUESTS, *SERVER_METRICS)
"""All metrics but those of the process, which the client library names."""


@attrs.frozen
class FamilyCollector(Collector):
    families: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.families


class Metrics(Collector):
    """The metrics of the app, apart from the registry of an embedding program."""

    def __init__(self, listed: Callable[[], Sequence[ModelEntry]]) -> None:
        self._entries = listed
        self.requests = RequestCounts()
        self.ignored: IgnoredNames = IgnoredNames()
        self.malformed_calls: MalformedCalls = MalformedCalls()
        self.batches: Callable[[], Mapping[str, Any] | None] = lambda: None
        """The health of batches; None without any."""
        self.accounts: Callable[[], Sequence[KeyAccount]] = tuple
        self.responses: Counter[tuple[str, str, str]] = Counter()
        self._process = ProcessCollector(registry=None)

    def responded(self, method: str, path: str, status: int) -> None:
        """Count a response. `path` is the router's pattern: clients cannot create series."""
        self.responses[method, path, str(status)] += 1

    async def exposed(self) -> bytes:
        """Format all metrics in Prometheus' text format. Streams go on between two metrics."""
        # In OpenMetrics the client library turns `vllm:` into `vllm_` for scrapers that do not ask
        # for UTF-8 names.
        parts = []
        for family in self.collect():
            parts.append(generate_latest(FamilyCollector((family,))))
            await trio.lowlevel.checkpoint()
        return b"".join(parts)

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families. The actors' statistics are of the moment of the first
        metric."""
        listed = self.listed()
        scrapes = [
            (entry.names[0], _seen(entry.runtime)) for entry in listed if entry.runtime is not None
        ]
        counted = [(entry.names[0], self.requests.of(entry.names[0])) for entry in listed]
        for of_models in OF_MODELS:
            yield of_models.family(scrapes)
        for of_requests in OF_REQUESTS:
            yield of_requests.family(counted)
        for of_server in SERVER_METRICS:
            yield of_server.family(self)
        yield from self._process.collect()

    def listed(self) -> list[ModelEntry]:
        return [entry for entry in self._entries() if not entry.is_unused]


def _seen(runtime: Runtime) -> ModelScrape:
    return ModelScrape(runtime, runtime.health(), runtime.channels())
