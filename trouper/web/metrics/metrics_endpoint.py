"""GET /metrics. No key is needed without a key file, as for /health: metrics describe load, never
the content of requests."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from quart import Response

from trouper.web.http.endpoints import Endpoint
from trouper.web.metrics.collector import Metrics


class Scrapes:
    """The handler."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint(
                method="GET",
                path="/metrics",
                handler=self.metrics,
                tag="Server",
                summary="Metrics for Prometheus",
                description=(
                    "In Prometheus' text format; docs/metrics.md says what each of them is."
                ),
                answer={"type": "string"},
                content_type="text/plain",
            ),
        )

    async def metrics(self) -> Response:
        return Response(await self._metrics.exposed(), content_type=CONTENT_TYPE_PLAIN_0_0_4)
