"""What every dialect's handlers share: the model that is asked for, requests on their way, responses."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar, TypeVarTuple, Unpack, cast
from uuid import uuid4

import attrs
import msgspec
import trio
from quart import Response, request
from quart.wrappers.response import ResponseBody

from trouper import heap
from trouper.actors.runtime.answer import Answer
from trouper.actors.runtime.model_manager import ModelEntry, Models, model_not_found
from trouper.actors.runtime.runtime import Runtime
from trouper.protocol.problems import RequestFailed
from trouper.protocol.record import Reason, RequestRecord
from trouper.protocol.requests import Generate
from trouper.protocol.settings import ServerSettings
from trouper.web.http.body_parsing import parse_json
from trouper.web.observability.request_log import Asked, Journal
from trouper.web.output.dialect import Shape
from trouper.web.streaming.response_streams import EventStream, collect_all, is_long

log = logging.getLogger("trouper.web")
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
LARGE_BODY = 2**17
"""Bytes beyond which what is done with a body leaves the event loop: a few milliseconds of it."""
HUGE_BODY = 2**20
"""Bytes of a body after which memory is given back to the system."""
GIVE_BACK_AFTER_S = 0.5
"""Delay after the end of such a request, until its body has been freed; requests that end meanwhile share one call."""
LARGE_AT_ONCE = 2
"""Large bodies that are parsed at a time. Parsing holds the GIL, so more threads would only wait for one another."""
LONGEST_KEPT = 512
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Heap:
    """Gives memory back to the system once for all huge requests that end at about the same time."""

    def __init__(self) -> None:
        self._due = False

    def give_back_soon(self) -> None:
        if not self._due:
            self._due = True
            trio.lowlevel.spawn_system_task(self._give_back)

    async def _give_back(self) -> None:
        await trio.sleep(GIVE_BACK_AFTER_S)
        self._due = False
        await trio.to_thread.run_sync(heap.give_back)


@attrs.frozen(eq=False)
class Served:
    """A model that is ready, and how it was asked for."""

    runtime: Runtime
    asked: Asked

    @property
    def name(self) -> str:
        """That clients know it by."""
        return self.asked.model

    @property
    def fingerprint(self) -> str:
        card = self.runtime.model
        return f"fp_{card.architecture}_{card.dtype}"


def context_of(runtime: Runtime) -> int:
    """The most tokens of one row."""
    own = runtime.model.context_length
    return min(own, runtime.settings.max_kv_size or own)


def listed_body(listed: ModelEntry) -> dict[str, Any]:
    """A model as GET /v1/models lists it. What is not known before it is loaded is left out."""
    body: dict[str, Any] = {"id": listed.names[0], "object": "model", "created": 0, "owned_by": "trouper"}
    if listed.runtime is not None:
        card = listed.runtime.model
        body |= {"created": card.created, "max_model_len": card.context_length}
    return body | {"loaded": listed.state == "ready"}


class Service:
    """One for the app. Its methods are for the request at hand."""

    def __init__(
        self,
        models: Models,
        settings: ServerSettings,
        background: trio.Nursery | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.models, self.settings = models, settings
        self._background = background
        self.journal = journal or Journal()
        self._running: dict[str, set[Answer]] = {}
        self._large = trio.CapacityLimiter(LARGE_AT_ONCE)
        self._heap = Heap()

    # -- the request at hand -----------------------------------------------------------------------

    @property
    def _state(self) -> dict[str, Any]:
        return cast("dict[str, Any]", request.scope["state"])

    @property
    def request_id(self) -> str:
        """The client's own if it is sane, else a new one; the same throughout the request."""
        state = self._state
        if "request_id" not in state:
            given = request.headers.get("X-Request-Id", "")
            state["request_id"] = given if REQUEST_ID.fullmatch(given) else uuid4().hex
        return cast("str", state["request_id"])

    @property
    def submitted(self) -> bool:
        """A model was asked, so the journal has it."""
        return "submitted" in self._state

    async def body(self) -> dict[str, Any]:
        """The request's JSON object. Raises `RequestFailed` (400), or werkzeug's 408 and 413."""
        data = cast("bytes", await request.get_data(as_text=False))
        self._state["large"] = len(data) > LARGE_BODY
        if len(data) > HUGE_BODY:
            self.at_end(self._heap.give_back_soon)
        return await self.aside(parse_json, data)

    async def read(self, parse: Callable[[dict[str, Any]], T]) -> T:
        """The body, parsed."""
        return await self.aside(parse, await self.body())

    async def aside(self, function: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        """Call it; in a thread if the body is large, so that the others' streams go on meanwhile."""
        if not self._state["large"]:
            return function(*arguments)
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._large)

    def at_end(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call it when the request is over, however that happens."""
        self._state["owned"].callback(callback, *arguments)

    @property
    def has_background(self) -> bool:
        return self._background is not None

    def outlive(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run it beyond the connection. What the request acquired until now is released when it has ended."""
        assert self._background is not None
        self._background.start_soon(_owning, self._state["owned"].pop_all(), work)

    # -- models ------------------------------------------------------------------------------------

    async def served(self, model: str | None) -> Served:
        """The model of that name, for as long as this request lasts; None: the default. Raises `RequestFailed` (404,
        503)."""
        asked = self._asked(model)
        try:
            lease = await self.models.lease(model)
        except RequestFailed as failed:
            self._unserved(asked, "refused", failed.problem.code or failed.problem.type)
            raise
        except trio.Cancelled:
            self._unserved(asked, "abort", "")
            raise
        self.at_end(lease.release)
        return Served(lease.runtime, asked)

    def _asked(self, model: str | None) -> Asked:
        """Raises `RequestFailed` (404)."""
        named = self.models.listed()[0] if model is None else self.listed(model)
        headers = request.headers
        trace = _kept(headers.get("traceparent", "")), _kept(headers.get("tracestate", ""))
        return Asked(named.names[0], request.path, trio.current_time(), *trace)

    def _unserved(self, asked: Asked, reason: Reason, code: str) -> None:
        """It ended while it waited for its model, or heard that there is none of it."""
        self._state["submitted"] = True
        ended = trio.current_time()
        record = RequestRecord(
            request_id=self.request_id, reason=reason, code=code, arrived_at=asked.at, ended_at=ended
        )
        self.journal.note(asked, record)

    def listed(self, model: str) -> ModelEntry:
        """Raises `RequestFailed` (404)."""
        listed = self.models.listed()
        found = next((one for one in listed if model in one.names), None)
        if found is None:
            raise model_not_found(model, listed)
        return found

    # -- answers -----------------------------------------------------------------------------------

    async def submit(self, served: Served, generates: Sequence[Generate]) -> list[Answer]:
        """Admission comes before a response exists. What was admitted is closed with the request, however that ends."""
        return [await self._submit(served, generate) for generate in generates]

    async def _submit(self, served: Served, generate: Generate) -> Answer:
        self._state["submitted"] = True
        answer = await served.runtime.submit(generate, partial(self.journal.note, served.asked))
        running = self._running.setdefault(self.request_id, set())
        running.add(answer)
        self.at_end(self._ended, self.request_id, answer)
        return answer

    def _ended(self, request_id: str, answer: Answer) -> None:
        answer.close()
        running = self._running[request_id]
        running.discard(answer)
        if not running:
            del self._running[request_id]

    def cancel(self, request_id: str) -> bool:
        """By the id of the response's X-Request-Id header, or of its body. Whoever waits for it is told."""
        found = self._running.get(request_id) or self._running.get(re.split("[-_]", request_id, maxsplit=1)[-1])
        for answer in found or ():
            answer.cancel()
        return found is not None

    async def respond(self, shape: Shape, answers: Sequence[Answer], *, stream: bool) -> Response:
        if not stream:
            choices = await collect_all(answers)
            if is_long(choices):
                return encoded(await trio.to_thread.run_sync(lambda: msgspec.json.encode(shape.body(choices))))
            return as_json(shape.body(choices))
        nursery = cast("trio.Nursery", self._state["nursery"])
        return as_events(EventStream(shape, answers, self.settings.heartbeat_s, nursery))


def _kept(header: str) -> str:
    """A header that the journal keeps; not a long one, which would cost memory for as long as the record does. W3C
    lets traces lose their state beyond this."""
    return header if len(header) <= LONGEST_KEPT else ""


async def _owning(owned: ExitStack, work: Callable[[], Awaitable[None]]) -> None:
    """A failure costs nobody else anything."""
    with owned:
        try:
            await work()
        except Exception:
            log.exception("work in the background failed; the rest goes on")


def as_json(body: Any, status: int = 200) -> Response:
    return encoded(msgspec.json.encode(body), status)


def encoded(data: bytes, status: int = 200) -> Response:
    """A response of JSON that is encoded already."""
    return Response(data, status, content_type="application/json")


def as_events(body: ResponseBody) -> Response:
    """Server-sent events, for as long as they come."""
    response = Response(body, content_type="text/event-stream; charset=utf-8")
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    response.timeout = None
    return response


def now() -> int:
    """Unix seconds."""
    return int(time.time())
