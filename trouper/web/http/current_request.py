"""The request at hand: its id, its body, what is released with it, and the names in it that are
read past."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from time import perf_counter
from typing import Any, TypeVar, TypeVarTuple, Unpack, cast
from uuid import uuid4

import trio
from quart import request

from trouper import heap
from trouper.protocol.problems import RequestFailed
from trouper.protocol.settings import ServerSettings
from trouper.web.http.body_complexity import parsed_bytes
from trouper.web.http.body_parsing import parse_json
from trouper.web.http.byte_budget import ByteBudget, Holding, default_bytes
from trouper.web.http.content_encoding import decoded, is_encoded
from trouper.web.http.heap_return import HUGE_BODY, Heap
from trouper.web.http.leniency import ReadPast
from trouper.web.http.loop_shares import LoopShares, Meter
from trouper.web.http.paced_body import PacedBody
from trouper.web.http.request_body import Report, refuse
from trouper.web.observability.ignored_names import IgnoredNames

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
LARGE_BODY = 2**17
"""Body size in bytes beyond which parsing leaves the event loop, which it would block for a few
milliseconds."""
LARGE_AT_ONCE = 2
"""Number of large bodies that are parsed at a time. Parsing holds the GIL, so more threads would
only wait for one another."""
BATCH_OWNER = "trouper.batch_owner"
"""Key in the state of a request that is a line of a batch. Its value is the identity of the API key
that made the batch. No client can set it: the state is not part of what is sent."""
BATCH_BEGIN = "trouper.batch_begin"
"""Key in the state of such a request. Its value is awaited before a model works for the request; it
may raise `RequestFailed`."""
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
STATE: ContextVar[dict[str, Any]] = ContextVar("STATE")
"""State of the request at hand. It is read some forty times a request, and Quart's `request` takes
ten times as long."""


@contextmanager
def at_hand(state: dict[str, Any]) -> Iterator[None]:
    """Make the request of this state the one at hand."""
    token = STATE.set(state)
    try:
        yield
    finally:
        STATE.reset(token)


def meter_of(state: dict[str, Any]) -> Meter:
    """Return the meter of the request of this state."""
    return cast("Meter", state.setdefault("meter", Meter()))


class CurrentRequest:
    """Access to the request at hand. There is one object for the app; its methods need a request
    context."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.ignored = IgnoredNames()
        self._large = trio.CapacityLimiter(LARGE_AT_ONCE)
        self._heap = Heap()
        self._shares = LoopShares()
        given = settings.request_memory
        self.budget = ByteBudget(default_bytes(settings) if given is None else given)

    @property
    def _state(self) -> dict[str, Any]:
        return STATE.get()

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers by their names in lower case; of several with one name, the first. Quart's
        look through all of them for each name, and raise and catch an exception for one that is
        missing."""
        state = self._state
        if "headers" not in state:
            state["headers"] = {name.lower(): value for name, value in reversed([*request.headers])}
        return cast("Mapping[str, str]", state["headers"])

    @property
    def request_id(self) -> str:
        """The client's X-Request-Id if it is valid, else a new id; the same throughout the
        request."""
        state = self._state
        if "request_id" not in state:
            given = self.headers.get("x-request-id", "")
            state["request_id"] = given if REQUEST_ID.fullmatch(given) else uuid4().hex
        return cast("str", state["request_id"])

    @property
    def batch_owner(self) -> str | None:
        """Identity of the key for which this request runs as a line of a batch; None: it is no such
        line."""
        return cast("str | None", self._state.get(BATCH_OWNER))

    async def begin_line(self) -> None:
        """Note that a model is about to work for this line of a batch. Raises `RequestFailed`
        (503)."""
        if (begin := self._state.get(BATCH_BEGIN)) is not None:
            await begin()

    @property
    def submitted(self) -> bool:
        """Whether a model was asked, so that the request log has an entry for this request."""
        return "submitted" in self._state

    @property
    def read_past(self) -> ReadPast:
        """The names of this request that are read past, unless the server is strict."""
        state = self._state
        if "read_past" not in state:
            state["read_past"] = ReadPast()
        return cast("ReadPast", state["read_past"])

    @property
    def report(self) -> Report:
        """What becomes of names that are not read."""
        return refuse if self.settings.strict else self.read_past

    @property
    def tenant(self) -> str:
        """What stands for the client of this request: here its address."""
        peer = request.scope.get("client")
        return f"address {peer[0]}" if peer else ""

    async def begin_turn(self, *, waits: bool) -> None:
        """Wait until the tenant of this request may begin one more, if it `waits`."""
        tenant = self.tenant
        await self._shares.begin(tenant, meter_of(self._state), waits=waits)
        self.at_end(self._shares.end, tenant)
        self.at_end(self.end_turn)

    def end_turn(self) -> None:
        """Charge this request's tenant for what the event loop did for it. Idempotent."""
        self._shares.close(meter_of(self._state))

    @property
    def holding(self) -> Holding:
        """The bytes that are held for this request, until it is over."""
        state = self._state
        if "holding" not in state:
            state["holding"] = holding = self.budget.open(self.tenant)
            self.at_end(holding.give_back)
        return cast("Holding", state["holding"])

    def hold(self, amount: int) -> None:
        """Hold so many bytes more. Raises `RequestFailed` (413, 429, 503)."""
        self.holding.take(amount)

    @property
    def body_bytes(self) -> int:
        """Bytes of the body, decompressed."""
        return cast("int", self._state["body_bytes"])

    def count(self) -> None:
        """Count this request, before its body is read. Raises `RequestFailed` (429)."""

    async def body(self) -> dict[str, Any]:
        """Return the request's JSON object. Raises `RequestFailed` (400, 413, 415, 429, 503), or
        werkzeug's 408 and 413."""
        data = await self._received()
        encoding = self.headers.get("content-encoding", "")
        if is_encoded(encoding):
            limit = self.settings.max_body_bytes
            data = await trio.to_thread.run_sync(
                decoded, data, encoding, limit, self._take_from_thread, limiter=self._large
            )
            if len(data) > HUGE_BODY:
                self.at_end(self._heap.give_back_soon)
        self._state["body_bytes"], self._state["large"] = len(data), len(data) > LARGE_BODY
        self.holding.take_up_to(await self.run_off_loop(parsed_bytes, data))
        try:
            return await self.run_off_loop(
                parse_json, data, None if self.settings.strict else self.read_past
            )
        finally:
            if len(data) > HUGE_BODY:
                del data
                await trio.to_thread.run_sync(heap.give_back)

    async def _received(self) -> bytes:
        """Receive the body, for which bytes are held before it comes. Raises as `body` does."""
        body, size = cast("PacedBody", request.body), request.content_length
        try:
            self.count()
            if size is not None and size <= self.settings.max_body_bytes:  # Else Quart refuses it.
                self.hold(2 * size)  # It is copied when it is whole.
            body.admit(inf, self._take_text if size is None else None)
        except RequestFailed:
            await body.drop(self.settings.body_timeout_s)
            raise
        try:
            return cast("bytes", await request.get_data(cache=False, as_text=False))
        finally:
            if body.received > HUGE_BODY:
                self.at_end(self._heap.give_back_soon)

    def _take_text(self, size: int) -> None:
        """Hold what so many bytes of a body take, if they are text."""
        self.holding.take(3 * size)

    def _take_from_thread(self, size: int) -> None:
        trio.from_thread.run_sync(self._take_text, size)

    def note_ignored(self) -> None:
        """Count and log the names that were read past since the last call."""
        self.ignored.note(self.read_past.take_new(), request.path)

    def ignored_names(self) -> str:
        """Return the header that names what the request was read past; empty if there is
        nothing."""
        self.note_ignored()
        return ", ".join(self.read_past.names)

    async def read(self, parse: Callable[[dict[str, Any], Report], T]) -> T:
        """Return the parsed body."""
        body = await self.body()
        try:
            return await self.run_off_loop(parse, body, self.report)
        finally:
            self.note_ignored()

    async def run_off_loop(
        self, function: Callable[[Unpack[Arguments]], T], *arguments: *Arguments
    ) -> T:
        """Call the function; in a thread if the body is large, so that the streams of other
        requests go on meanwhile."""
        if not self._state["large"]:
            return function(*arguments)
        meter = meter_of(self._state)

        def timed() -> T:
            began = perf_counter()
            try:
                return function(*arguments)
            finally:
                meter.spent_s += perf_counter() - began

        return await trio.to_thread.run_sync(timed, limiter=self._large)

    def takes_long(self) -> None:
        """Let `run_off_loop` use threads from now on, however small the body was."""
        self._state["large"] = True

    def at_end(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Register a callback that runs when the request is over, however it ends."""
        self._state["owned"].callback(callback, *arguments)
