"""Runs a line of a batch through the app without a socket, and formats the line of the output or
error file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import attrs
import msgspec
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ConnectionState, HTTPScope

from trouper.web.http.json_response import error_body, http_problem
from trouper.web.http.media_fetch import ReadOnce
from trouper.web.serving.current_request import (
    BATCH_BEGIN,
    BATCH_IMAGES,
    BATCH_OWNER,
)

Begin = Callable[[], Awaitable[None]]
Asgi = Callable[[HTTPScope, ASGIReceiveCallable, ASGISendCallable], Awaitable[None]]

NOT_JSON = http_problem(
    400,
    "in a batch an answer is one JSON object: leave out what streams it",
    "unsupported_parameter",
)


@attrs.frozen
class LineResponse:
    status: int
    body: bytes


@attrs.frozen
class LineRunner:
    """Requests have no key and act for the batch's owner."""

    app: Asgi

    async def run(
        self,
        endpoint: str,
        body: bytes,
        request_id: str,
        owner: str,
        *,
        begin: Begin,
        read_image: ReadOnce | None = None,
    ) -> LineResponse:
        """Return the response, whatever the status. Cancellation aborts the request. `begin` is
        awaited before a model works and may raise `RequestFailed`."""
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

        state = ConnectionState({BATCH_OWNER: owner, BATCH_BEGIN: begin, BATCH_IMAGES: read_image})
        scope = _scope(endpoint, len(body), request_id, state)
        await self.app(scope, cast("ASGIReceiveCallable", receive), cast("ASGISendCallable", send))
        # Else a line of the output file could not be read.
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


class _ErrorCode(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorCode | None = None


def code_of(response: LineResponse) -> str | None:
    try:
        error = msgspec.json.decode(response.body, type=_ErrorBody).error
    except msgspec.MsgspecError:
        return None
    return error.code if error is not None else None


def output_line(request_id: str, custom_id: str, response: LineResponse) -> bytes:
    """The response may have any status."""
    answer = {
        "status_code": response.status,
        "request_id": request_id,
        "body": msgspec.Raw(response.body),
    }
    return _line(request_id, custom_id, answer, None)


def error_line(request_id: str, custom_id: str, code: str, message: str) -> bytes:
    return _line(request_id, custom_id, None, {"code": code, "message": message})


def _line(request_id: str, custom_id: str, response: object, error: object) -> bytes:
    line = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line)
