"""An HTTP request with its response and the records of its prompts, for traces."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import trio
from quart import Request

from trouper.protocol.record import RequestRecord
from trouper.protocol.requests import Generate
from trouper.web.http.endpoints import PATH_PARAMETER

log = logging.getLogger("trouper.web")
MAX_CHARS = 512  # Bound of a client's text.

# Paths of probes and scrapes, which would bury the other requests.
UNTRACED = frozenset({"/health", "/livez", "/readyz", "/metrics"})


@attrs.define(eq=False, kw_only=True)
class Exchange:
    """Complete when the response has ended and no model works for the request any more. Times are
    those of `RequestRecord`."""

    method: str
    path: str
    """As the client sent it."""
    scheme: str = "http"
    http_version: str = "1.1"
    socket: tuple[str, int | None] | None = None
    """The server's own address and port; None for a line of a batch."""
    headers: Mapping[str, str]
    request_id: str
    route: str = ""
    """The template of the path: "/v1/models/{model}"; "": nothing is there."""
    began_at: float = attrs.field(factory=trio.current_time)
    ended_at: float = 0.0
    unix_offset: float = 0.0
    status: int | None = None
    """None: no response was sent."""
    is_complete: bool = False
    """Whether the response was sent to its end."""
    in_background: bool = False
    """Whether models work beyond the response."""
    model: str = ""
    """The model's name as the client sent it; "": none."""
    response_id: str = ""
    streamed: bool = False
    seed: int | None = None
    generate: Generate | None = None
    """The first one."""
    records: list[RequestRecord] = attrs.field(factory=list)
    _prompts: dict[str, int] = attrs.field(factory=dict)
    """The prompt's number by the record's id; choices of one prompt share one."""

    @classmethod
    def open(cls, request: Request, headers: Mapping[str, str], request_id: str) -> Exchange:
        scope = request.scope
        raw: bytes = scope.get("raw_path") or request.path.encode()
        return cls(
            method=request.method,
            path=raw.partition(b"?")[0].decode("latin-1")[:MAX_CHARS],
            scheme=scope["scheme"],
            http_version=scope["http_version"],
            socket=scope.get("server"),
            headers=headers,
            request_id=request_id,
        )

    def header(self, name: str) -> str:
        """Return a header; "" for a long one, which W3C allows for trace state."""
        value = self.headers.get(name, "")
        return value if len(value) <= MAX_CHARS else ""

    def note_parameters(self, body: Any) -> None:
        body = getattr(body, "request", body)
        self.streamed, self.seed = bool(getattr(body, "stream", False)), getattr(body, "seed", None)

    def note_submission(self, generates: Sequence[Generate]) -> None:
        self.generate = self.generate or generates[0]
        last: object = None
        number = len(set(self._prompts.values())) - 1
        for generate in generates:
            number += generate.prompt is not last
            last = generate.prompt
            self._prompts[generate.request_id] = number

    def note_sent(self, message: Mapping[str, Any], rule: str) -> None:
        """Note an ASGI message that was sent. `rule` is the router's; "": none."""
        if message["type"] == "http.response.start":
            self.status, self.route = message["status"], PATH_PARAMETER.sub(r"{\1}", rule)
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_complete = True

    def by_prompt(self) -> list[list[RequestRecord]]:
        """The records of each prompt's choices, in the order of the request."""
        numbers = {name: position for position, name in enumerate(self._prompts)}
        prompts = dict[int, list[RequestRecord]]()
        for record in sorted(self.records, key=lambda record: numbers.get(record.request_id, 0)):
            prompts.setdefault(self._prompts.get(record.request_id, 0), []).append(record)
        return list(prompts.values())

    def leave(self) -> None:
        self.ended_at = trio.current_time()

    def report(self, observers: Iterable[ExchangeObserver]) -> None:
        """Call the observers. Runs in cancelled cleanup: neither waits nor raises."""
        if not self.in_background:
            self.leave()
        self.unix_offset = time.time() - trio.current_time()
        for observer in observers:
            try:
                observer(self)
            except Exception:
                log.exception("the end of request %s could not be traced", self.request_id)


ExchangeObserver = Callable[[Exchange], None]
