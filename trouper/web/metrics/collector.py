"""A scrape: everything is read from what the actors have published anyway, so it costs nothing between scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import attrs
import trio
from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from trouper.actors.runtime.model_manager import ModelEntry
from trouper.actors.runtime.runtime import Runtime
from trouper.protocol.version import VERSION
from trouper.web.metrics.metric import Named, Seen
from trouper.web.metrics.request_metrics import RequestCounts
from trouper.web.metrics.trouper_metrics import OWN, OWN_OF_REQUESTS
from trouper.web.metrics.vllm_metrics import VLLM, VLLM_OF_REQUESTS

OF_LOADED = (*VLLM, *OWN)
OF_REQUESTS = (*VLLM_OF_REQUESTS, *OWN_OF_REQUESTS)
"""Counted here, so that they outlive a model's being loaded."""
LOADED = Named("gauge", "trouper_model_loaded", "1 while the model can be asked.", ("model_name",))
WAITING = Named(
    "gauge",
    "trouper_model_requests_waiting",
    "Requests that wait for the model to be loaded, or for room for it.",
    ("model_name",),
)
BUILD = Named("gauge", "trouper_build_info", "Which version serves.", ("version",))
RESPONSES = Named(
    "counter",
    "trouper_http_responses_total",
    "Responses, by the endpoint and the status that they began with.",
    ("method", "path", "status"),
)
ALL = (*(told.named for told in OF_LOADED), *(told.named for told in OF_REQUESTS), LOADED, WAITING, BUILD, RESPONSES)
"""Beside those of the process, which the client library names."""


@attrs.frozen
class Some(Collector):
    """A part of a scrape."""

    families: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.families


class Metrics(Collector):
    """One for the app, in no registry, so that an embedding program's is not touched."""

    def __init__(self, listed: Callable[[], Sequence[ModelEntry]]) -> None:
        self._listed = listed
        self.requests = RequestCounts()
        self._responses: Counter[tuple[str, str, str]] = Counter()
        self._version = VERSION
        self._process = ProcessCollector(registry=None)

    def responded(self, method: str, path: str, status: int) -> None:
        """`path` is the router's, so that there are not as many as clients can think of."""
        self._responses[method, path, str(status)] += 1

    async def exposed(self) -> bytes:
        """In Prometheus' text format, whatever else a scraper would like better: written as OpenMetrics, the client library
        makes `vllm_` of `vllm:` for every scraper that does not ask for UTF-8 names. One metric at a time, since the library
        takes milliseconds for all of them and streams want to go on."""
        parts = []
        for family in self.collect():
            parts.append(generate_latest(Some((family,))))
            await trio.lowlevel.checkpoint()
        return b"".join(parts)

    def collect(self) -> Iterator[Metric]:
        """What the actors say is of the moment of the first metric, however long the rest takes."""
        listed = self._listed()
        seen = [(one.names[0], _seen(one.runtime)) for one in listed if one.runtime is not None]
        for told in OF_LOADED:
            yield told.named.family(value for model, one in seen for value in told.values(model, one))
        counted = [(one.names[0], self.requests.of(one.names[0])) for one in listed]
        for told_of in OF_REQUESTS:
            yield told_of.named.family(value for model, one in counted for value in told_of.values(model, one))
        yield LOADED.family(((one.names[0],), int(one.state == "ready")) for one in listed)
        yield WAITING.family(((one.names[0],), one.waiting) for one in listed)
        yield BUILD.family([((self._version,), 1)])
        yield RESPONSES.family(self._responses.items())
        yield from self._process.collect()


def _seen(runtime: Runtime) -> Seen:
    return Seen(runtime, runtime.health(), runtime.channels())
