"""One JSON line for each HTTP request: what came, what was answered, and for how long nothing was
sent. Others for each request's tokens, and for each image that the engine gets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import attrs
import trio
from hypercorn.typing import ASGIFramework, ASGIReceiveCallable, ASGISendCallable, Scope

from trouper.protocol.media import Pixels
from trouper.protocol.record import RequestRecord


@attrs.define
class Exchange:
    """One request, while it runs."""

    method: str
    path: str
    began: float
    given_headers: dict[str, str]
    """Of the request"""
    body: bytes = b""
    status: int = 0
    headers: dict[str, str] = attrs.field(factory=dict)
    """Of the answer"""
    answer: bytes = b""
    silence_s: float = 0.0
    """The longest time without a byte."""
    event_silence_s: float = 0.0
    """The longest time without an event; comments are none."""
    ended: bool = False
    """It was answered to the end: the client did not leave."""
    _sent: float = 0.0
    _sent_event: float = 0.0

    def __attrs_post_init__(self) -> None:
        self._sent = self._sent_event = self.began

    def sent(self, data: bytes) -> None:
        now = trio.current_time()
        self.silence_s, self._sent = max(self.silence_s, now - self._sent), now
        if not data.startswith(b":"):
            self.event_silence_s, self._sent_event = (
                max(self.event_silence_s, now - self._sent_event),
                now,
            )
        self.answer += data

    def line(self) -> dict[str, Any]:
        fields = attrs.asdict(
            self, filter=lambda field, _: not field.name.startswith("_") and field.name != "began"
        )
        texts = {name: fields[name].decode(errors="replace") for name in ("body", "answer")}
        seconds = trio.current_time() - self.began
        return {"kind": "http", "pid": os.getpid(), **fields, **texts, "seconds": seconds}


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """By names in lower case."""
    return {name.decode().lower(): value.decode("latin-1") for name, value in headers}


class Recorder:
    """Writes the lines. `observe` takes the records of requests, which have tokens of the prompt
    and of the cache."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def observe(self, record: RequestRecord) -> None:
        self._write({"kind": "request", **attrs.asdict(record)})

    def look(self, pixels: Pixels) -> None:
        """Note an image as the engine gets it."""
        digest = sha256(pixels.rgb).hexdigest()
        size = {"width": pixels.width, "height": pixels.height}
        self._write({"kind": "image", **size, "sha256": digest})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def around(self, app: ASGIFramework) -> ASGIFramework:
        async def recorded(
            scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
        ) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            exchange = Exchange(
                scope["method"], scope["path"], trio.current_time(), _texts(scope["headers"])
            )

            async def heard() -> Any:
                message = await receive()
                exchange.body += cast("dict[str, Any]", message).get("body", b"")
                return message

            async def say(message: Any) -> None:
                if message["type"] == "http.response.start":
                    exchange.status = message["status"]
                    exchange.headers = _texts(message["headers"])
                elif message["type"] == "http.response.body":
                    exchange.sent(message.get("body", b""))
                    exchange.ended = not message.get("more_body", False)
                await send(message)

            try:
                await app(scope, cast("ASGIReceiveCallable", heard), cast("ASGISendCallable", say))
            finally:
                self._write(exchange.line())

        return cast("ASGIFramework", recorded)
