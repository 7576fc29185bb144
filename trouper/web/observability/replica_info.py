"""GET /server_info: what a router asks the servers that it sends requests to (docs/replicas.md)."""

from __future__ import annotations

from quart import Response

from trouper.protocol.version import VERSION
from trouper.web.http.endpoints import Endpoint
from trouper.web.http.request_schema import TEXT, closed
from trouper.web.service import Service, as_json

INFO = closed(
    {
        "served_model_name": TEXT,
        "model_path": TEXT,
        "version": TEXT,
        "max_running_requests": {"type": "integer"},
    },
    "served_model_name",
    "model_path",
    "version",
)


class Replica:
    """The handlers. Names as SGLang's servers have them, so that its router knows which model it
    routes to."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint(
                method="GET",
                path="/server_info",
                handler=self.server_info,
                tag="Server",
                summary="What a router wants to know",
                description=(
                    "The default model, and how many requests decode together once it is loaded."
                ),
                answer=INFO,
            ),
        )

    async def server_info(self) -> Response:
        first = self._service.listed(None)
        name = first.names[0]
        body: dict[str, str | int] = {
            "served_model_name": name,
            "model_path": name,
            "version": VERSION,
        }
        if first.runtime is not None:
            body["max_running_requests"] = first.runtime.settings.rows
        return as_json(body)
