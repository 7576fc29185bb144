"""One request of a batch, run through the app as an HTTP request of its endpoint would be, but
without a socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import attrs
import msgspec
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ConnectionState, HTTPScope

from trouper.web.current_request import BATCH_BEGIN, BATCH_OWNER
from trouper.web.openai.errors import error_body, http_problem

Begin = Callable[[], Awaitable[None]]
Asgi = Callable[[HTTPScope, ASGIReceiveCallable, ASGISendCallable], Awaitable[None]]


NOT_JSON = http_problem(
    400,
    "in a batch an answer is one JSON object: leave out what streams it",
    "unsupported_parameter",
)


@attrs.frozen
class LineResponse:
    """The response to a request of a batch."""

    status: int
    body: bytes
    """JSON."""


@attrs.frozen
class LineRunner:
    """Runs requests through an app. A request has no key: it acts for the owner of its batch, whose
    key was checked when it was created."""

    app: Asgi

    async def run(
        self, endpoint: str, body: bytes, request_id: str, owner: str, *, begin: Begin
    ) -> LineResponse:
        """Return the response, whatever its status. Cancelling it aborts the request. `begin` is
        awaited before a model works for it, and may raise `RequestFailed`."""
        status, is_json, parts, received = 500, True, list[bytes](), False

        async def receive() -> Any:
            nonlocal received
            if received:
                await trio.sleep_forever()
            received = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status, is_json
            await trio.lowlevel.checkpoint()
            if message["type"] == "http.response.start":
                status = message["status"]
                is_json = (
                    dict(message["headers"])
                    .get(b"content-type", b"")
                    .startswith(b"application/json")
                )
            elif message["type"] == "http.response.body":
                parts.append(bytes(message.get("body", b"")))

        state = ConnectionState({BATCH_OWNER: owner, BATCH_BEGIN: begin})
        scope = _scope(endpoint, len(body), request_id, state)
        await self.app(scope, cast("ASGIReceiveCallable", receive), cast("ASGISendCallable", send))
        # As one line of a file it could not be read, nor could any other line of its log.
        if not is_json:
            return LineResponse(NOT_JSON.status, msgspec.json.encode(error_body(NOT_JSON)))
        return LineResponse(status, b"".join(parts))


def _scope(endpoint: str, size: int, request_id: str, state: ConnectionState) -> HTTPScope:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(size).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": endpoint,
        "raw_path": endpoint.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": state,
        "extensions": {},
    }
    return cast("HTTPScope", scope)
