"""GET /metrics, from statistics that the actors publish anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

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
    MetricFamily,
    ModelScrape,
)
from trouper.web.metrics.request_metrics import RequestCounts
from trouper.web.observability.request_log import IgnoredNames, MalformedCalls

LABELS = ("key", "model_name")
KEY_METRICS = tuple(
    (MetricFamily("counter", f"trouper_key_{name}_total", text, LABELS), name)
    for name, text in (
        ("requests", "Requests of a key that were let in."),
        ("prompt_tokens", "Tokens of its prompts, cached ones among them."),
        ("cached_tokens", "Tokens of these that need not be computed."),
        ("completion_tokens", "Tokens of its answers."),
    )
)

KEY_REFUSED = MetricFamily(
    "counter",
    "trouper_key_refused_total",
    "Requests of a key that were answered 429, by the error's code.",
    ("key", "code"),
)


def key_metrics(accounts: Callable[[], Sequence[KeyAccount]]) -> Iterator[Metric]:
    for family, name in KEY_METRICS:
        yield family.family(
            ((account.key.label, model), getattr(used, name))
            for account in accounts()
            for model, used in sorted(account.usage.items())
        )
    yield KEY_REFUSED.family(
        ((account.key.label, code), count)
        for account in accounts()
        for code, count in sorted(account.refused.items())
    )


COUNT = MetricFamily("gauge", "trouper_batches", "Batches, by their status.", ("status",))
RUNNING = MetricFamily(
    "gauge", "trouper_batch_requests_running", "Requests of batches that run.", ()
)
ANSWERED = MetricFamily(
    "counter",
    "trouper_batch_requests_total",
    "Requests of batches that were answered (completed), answered with an error (failed), or have "
    "to run again (again).",
    ("outcome",),
)
BYTES = MetricFamily("gauge", "trouper_batch_bytes", "Bytes of files and batches on disk.", ())
BATCH_METRICS = (COUNT, RUNNING, ANSWERED, BYTES)

LOADED = MetricFamily(
    "gauge", "trouper_model_loaded", "1 while the model can be asked.", ("model_name",)
)
WAITING = MetricFamily(
    "gauge",
    "trouper_model_requests_waiting",
    "Requests that wait for the model to be loaded, or for room for it.",
    ("model_name",),
)
BUILD = MetricFamily("gauge", "trouper_build_info", "Which version serves.", ("version",))
TASKS = MetricFamily(
    "gauge", "trouper_tasks", "Tasks of the event loop: actors, connections, requests.", ()
)
RESPONSES = MetricFamily(
    "counter",
    "trouper_http_responses_total",
    "Responses, by the endpoint and the status that they began with.",
    ("method", "path", "status"),
)
IGNORED = MetricFamily(
    "counter",
    "trouper_ignored_parameters_total",
    "Requests that were read past a parameter or a key of a message, by its name.",
    ("name",),
)
MALFORMED = MetricFamily(
    "counter",
    "trouper_malformed_calls_total",
    "Calls that the model did not write as its format has them: repaired, or no_call (given as "
    "text).",
    ("model_name", "outcome"),
)
ALL = (
    *(metric.named for metric in MODEL_METRICS),
    *(metric.named for metric in REQUEST_METRICS),
    LOADED,
    WAITING,
    BUILD,
    TASKS,
    RESPONSES,
    IGNORED,
    MALFORMED,
    *BATCH_METRICS,
    *(family for family, _ in KEY_METRICS),
    KEY_REFUSED,
)
"""All metrics but those of the process, which the client library names."""


@attrs.frozen
class FamilyCollector(Collector):
    families: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.families


class Metrics(Collector):
    """The metrics of the app, apart from the registry of an embedding program."""

    def __init__(self, listed: Callable[[], Sequence[ModelEntry]]) -> None:
        self._listed = listed
        self.requests = RequestCounts()
        self.ignored = IgnoredNames()
        self.malformed_calls = MalformedCalls()
        self.batches: Callable[[], Iterator[Metric]] = lambda: iter(())
        """Yields the families in `BATCH_METRICS`."""
        self.accounts: Callable[[], Sequence[KeyAccount]] = tuple
        self._responses: Counter[tuple[str, str, str]] = Counter()
        self._process = ProcessCollector(registry=None)

    def responded(self, method: str, path: str, status: int) -> None:
        """Count a response. `path` is the router's pattern: clients cannot create series."""
        self._responses[method, path, str(status)] += 1

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
        listed = [entry for entry in self._listed() if not entry.is_unused]
        scrapes = [
            (entry.names[0], _seen(entry.runtime)) for entry in listed if entry.runtime is not None
        ]
        for metric in MODEL_METRICS:
            yield metric.named.family(
                value for model, scrape in scrapes for value in metric.values(model, scrape)
            )
        counted = [(entry.names[0], self.requests.of(entry.names[0])) for entry in listed]
        for request_metric in REQUEST_METRICS:
            yield request_metric.named.family(
                value for model, counts in counted for value in request_metric.values(model, counts)
            )
        yield LOADED.family(((entry.names[0],), int(entry.state == "ready")) for entry in listed)
        yield WAITING.family(((entry.names[0],), entry.waiting) for entry in listed)
        yield BUILD.family([((VERSION,), 1)])
        yield TASKS.family([((), trio.lowlevel.current_statistics().tasks_living)])
        yield RESPONSES.family(self._responses.items())
        yield IGNORED.family(((name,), count) for name, count in self.ignored.counts.items())
        yield MALFORMED.family(self.malformed_calls.counts.items())
        yield from key_metrics(self.accounts)
        yield from self.batches()
        yield from self._process.collect()


def _seen(runtime: Runtime) -> ModelScrape:
    return ModelScrape(runtime, runtime.health(), runtime.channels())
