"""GET /, the files of the page, and GET /v1/live with its data."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from math import inf
from typing import Any

import msgspec
import trio
from quart import Response, request

from trouper.actors.runtime.served_models import Models
from trouper.protocol.record import RequestRecord
from trouper.protocol.suggested_models import SUGGESTED
from trouper.protocol.version import VERSION
from trouper.web.http.endpoints import REPORT
from trouper.web.http.json_response import as_json
from trouper.web.http.pages import page_headers
from trouper.web.http.query_parameters import Query
from trouper.web.live.snapshot import SNAPSHOT, NewGaps, found_body, model_body
from trouper.web.serving.running_requests import RunningRequests, waits_of
from trouper.web.serving.service import Service, as_events
from trouper.web.streaming.event_log import named_event

TICK_S = 1.0
"""A frame takes 10 ms of CPU in a browser without a GPU, on the machine of the model."""
QUIET_S = 2.0
RECENT = 50


class Feed:
    def __init__(
        self, models: Models, recent: Sequence[RequestRecord], running: RunningRequests
    ) -> None:
        self._models, self._recent, self._running = models, recent, running
        self._server = {"version": VERSION, "started": time.time()}
        """Constant fields. `started` also tells servers at the same address apart."""
        self._gaps: dict[str, NewGaps] = {}
        self._tick = -1
        self._last: RequestRecord | None = None
        """The newest request of the last snapshot."""
        self.number = 0
        self._sent_at = -inf
        self._last_encoded = b"", b"", b""
        self._body: dict[str, Any] = {}
        self._latest = b""

    @property
    def over(self) -> trio.Event:
        """Set when nothing will change any more."""
        return self._models.finished

    def snapshot(self) -> tuple[int, bytes]:
        """Return the number of the latest snapshot, and the snapshot as an event. A changed
        snapshot gets a new number."""
        tick = int(trio.current_time() / TICK_S)
        if tick != self._tick:
            self._tick = tick
            entries = self._models.entries()
            models = [
                model_body(entry, self._gaps.setdefault(entry.names[0], NewGaps()))
                for entry in entries
                if not entry.is_unused
            ]
            found = [found_body(entry) for entry in entries if entry.is_unused]
            encode = msgspec.json.encode
            waits = encode(waits_of(self._running.of(None)))
            self._tell(encode(models), encode(found), waits, self._ended())
        return self.number, self._latest

    def _tell(self, models: bytes, found: bytes, waits: bytes, ended: list[RequestRecord]) -> None:
        now, encoded = trio.current_time(), (models, found, waits)
        if encoded == self._last_encoded and not ended and now - self._sent_at < QUIET_S:
            return
        self.number += 1
        self._last_encoded, self._sent_at = encoded, now
        names = ("models", "found", "waits")
        raw = {name: msgspec.Raw(part) for name, part in zip(names, encoded, strict=True)}
        self._body = self._server | {"number": self.number, "at": now, "ended": ended} | raw
        self._latest = named_event("snapshot", self._body)

    async def once(self) -> dict[str, Any]:
        """A snapshot for one request, with the recent requests. Takes a tick: the first look asks
        actors for figures."""
        self.snapshot()
        await trio.sleep_until(next_tick())
        self.snapshot()
        return self._body | {"recent": self.recent()}

    def recent(self) -> list[RequestRecord]:
        return list(self._recent)[-RECENT:]

    def _ended(self) -> list[RequestRecord]:
        ended: list[RequestRecord] = []
        for record in reversed(self._recent):
            if record is self._last or len(ended) == RECENT:
                break
            ended.append(record)
        if ended:
            self._last = ended[0]
        return ended[::-1]


def next_tick() -> float:
    return (int(trio.current_time() / TICK_S) + 1) * TICK_S


async def watched(feed: Feed, *, manages_models: bool = False) -> AsyncGenerator[bytes]:
    """Yield one viewer's events. The first, `viewer`, has the viewer's rights. A slow viewer misses
    snapshots, and gets the recent requests again."""
    first = named_event("viewer", {"manages_models": manages_models})
    seen = -1
    while not feed.over.is_set():
        number, data = feed.snapshot()
        if number != seen:
            recent = b"" if number == seen + 1 else named_event("recent", feed.recent())
            yield first + recent + data
            first = b""
            seen = number
        with trio.move_on_at(next_tick()):
            await feed.over.wait()


TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
HEADERS = page_headers("script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'")
"""Headers that forbid inline scripts and styles, whatever a model writes."""
ASSETS = "/live/"


def suggestions() -> str:
    """Return options of models that fit small machines, with the bytes of their weights."""
    return "".join(
        f'<option value="{escape(model.name)}">{model.weights_bytes / 1e9:.1f} GB</option>'
        for model in SUGGESTED
    )


# Page and files are open; the data needs a key. The path of the files names their content: browsers
# cache them for ever.
class Site:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._feed = Feed(service.models, service.request_log.recent, service.running)
        static = {
            path.name: path.read_bytes()
            for path in files("trouper.web.live").joinpath("static").iterdir()
        }
        page = static.pop("index.html").decode()
        self._files = static
        self._digest = sha256(
            b"".join(name.encode() + data for name, data in sorted(static.items()))
        ).hexdigest()[:16]
        page = page.replace("{files}", f"{ASSETS.strip('/')}/{self._digest}")
        page = page.replace("{suggested}", suggestions())
        self._page = page.replace("{keyed}", "true" if service.keys.needed else "false").encode()
        self._etag = sha256(self._page).hexdigest()[:16]

    @REPORT(
        path="/v1/live",
        operation="watchLive",
        summary="What the actors do now",
        description="One snapshot; with `Accept: text/event-stream` an event `snapshot` a "
        "second while "
        "anything changes, else every two; when it begins also an event `viewer`, which "
        "says whether the key may manage models, and an event `recent` with the last "
        "requests. Nothing is "
        "computed while nobody looks.",
        answer=SNAPSHOT,
        events=SNAPSHOT,
        also=(400,),
    )
    async def live(self) -> Response:
        Query(request.args, (), self._service.report)
        if "text/event-stream" in request.headers.get("Accept", ""):
            manages = self._service.models.control is not None and self._service.has_right("admin")
            return as_events(watched(self._feed, manages_models=manages))
        return as_json(await self._feed.once())

    @REPORT(
        path="/",
        operation="getLivePage",
        summary="A page that shows it",
        answer={"type": "string"},
        content_type="text/html",
    )
    async def page(self) -> Response:
        response = Response(self._page, content_type="text/html; charset=utf-8", headers=HEADERS)
        response.headers["Cache-Control"] = "no-cache"
        response.set_etag(self._etag)
        return await response.make_conditional(request)

    async def file(self, digest: str, name: str) -> Response:
        """Serve a file of the page; 404 for files of another version."""
        kind = name.rpartition(".")[2]
        if digest != self._digest or name not in self._files:
            return Response(b"", 404, headers=HEADERS)
        response = Response(self._files[name], content_type=TYPES[kind], headers=HEADERS)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response
