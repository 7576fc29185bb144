"""What the handlers of every dialect share: leasing the requested model, submitting requests,
formatting responses."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import attrs
import msgspec
import trio
from quart import Response, request
from quart.wrappers.response import ResponseBody

from trouper.actors.request_intake import thinks_already
from trouper.actors.runtime.answer import Answer
from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import ModelEntry, Models, named
from trouper.protocol.api_keys import NO_KEYS, Keys
from trouper.protocol.key_options import ANYBODY, ApiKey
from trouper.protocol.names import NO_ALIASES
from trouper.protocol.problems import RequestFailed, bad_request
from trouper.protocol.record import Reason, RequestRecord
from trouper.protocol.requests import (
    BATCH_PRIORITY,
    CacheScope,
    Generate,
    Prompt,
    Timeouts,
    ignored_parts,
)
from trouper.protocol.settings import ServerSettings
from trouper.web import adapter_names
from trouper.web.http.guard import WRITER
from trouper.web.http.socket_writer import SocketWriter
from trouper.web.keys.current_key import CurrentKey
from trouper.web.keys.key_priority import priority_with
from trouper.web.model_aliases import ModelAliases
from trouper.web.observability.malformed_calls import MalformedCalls
from trouper.web.observability.request_log import RequestLog, RequestOrigin
from trouper.web.output.dialect import Dialect
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.tool_calls import Tools
from trouper.web.running_answers import RunningAnswers
from trouper.web.streaming.response_streams import (
    SCORE_BYTES,
    EventStream,
    at_once,
    collect_all,
    is_long,
)
from trouper.web.streaming.step_delivery import StepDelivery
from trouper.web.tool_support import ToolSupport

log = logging.getLogger("trouper.web")
MAX_HEADER_CHARS = 512
TOKEN_BYTES = 40
"""Memory of a token of a prompt that waits: an integer, and its place in a tuple."""
TOKENIZED_BYTES = 64
"""Memory for each byte of a body whose tokens are counted or sent: it may be a token."""


@attrs.frozen(eq=False)
class Served:
    """A model that is ready, and the origin of the request for it."""

    runtime: Runtime
    origin: RequestOrigin

    @property
    def name(self) -> str:
        """The model's name in the API, and that of its adapter."""
        return f"{self.origin.model}:{self.adapter}" if self.adapter else self.origin.model

    @property
    def adapter(self) -> str:
        """Name of the LoRA adapter that answers; "": the model itself."""
        return self.origin.adapter

    @property
    def fingerprint(self) -> str:
        card = self.runtime.model
        return f"fp_{card.architecture}_{card.dtype}"


def context_of(runtime: Runtime) -> int:
    """Maximum number of tokens of one sequence."""
    context_length = runtime.model.context_length
    return min(context_length, runtime.settings.max_kv_size or context_length)


class Service(CurrentKey):
    """The app's access to models, answers and the request at hand. There is one for the app; most
    methods need a request context."""

    def __init__(
        self,
        models: Models,
        settings: ServerSettings,
        background: trio.Nursery | None = None,
        request_log: RequestLog | None = None,
        keys: Keys = NO_KEYS,
        *,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        super().__init__(settings, keys, clock)
        self.models = models
        self._background = background
        self.request_log = request_log or RequestLog()
        self.running = RunningAnswers()
        self.delivery = StepDelivery()
        """Runs where `serve_http` does: a nursery of another program would not end before it."""
        self._tool_support = ToolSupport(self)
        self.malformed_calls = MalformedCalls()
        self.aliases = ModelAliases(models, NO_ALIASES if settings.strict else settings.model_alias)

    @property
    def has_background(self) -> bool:
        return self._background is not None

    def run_in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` beyond the connection. Resources that the request has acquired until now are
        released when `work` has ended."""
        assert self._background is not None
        self._background.start_soon(_owning, self._state["owned"].pop_all(), work)

    # -- models -----------------------------------------------------------------------------------

    async def served(self, model: str | None, adapter: str | None = None) -> Served:
        """Lease the model of that name, or the one that answers to it (--model-alias), for as long
        as this request lasts; None is the default model. `adapter`: a LoRA adapter of it, if the
        name has none. Raises `RequestFailed` (404, 503)."""
        model, named = adapter_names.split(model, self.entries())
        model = None if model is None else self.resolved(model)
        origin = self._origin(model, named, adapter)
        model = origin.model if model is None else model
        try:
            lease = await self.models.lease(model)
        except RequestFailed as failed:
            self._unserved(origin, "refused", failed.problem.code or failed.problem.type)
            raise
        except trio.Cancelled:
            self._unserved(origin, "abort", "")
            raise
        self.at_end(lease.release)
        return Served(lease.runtime, origin)

    def _origin(self, model: str | None, named: str, adapter: str | None) -> RequestOrigin:
        """Collect what the request log needs to know of this request. Raises `RequestFailed`
        (404)."""
        entry = self.listed(model)
        headers = self.headers
        trace = (
            _bounded_header(headers.get("traceparent", "")),
            _bounded_header(headers.get("tracestate", "")),
        )
        adapter = adapter_names.agreed(named, adapter, entry)
        return RequestOrigin(
            entry.names[0],
            request.path,
            trio.current_time(),
            *trace,
            adapter=adapter,
            key=self.key_label,
        )

    def _unserved(self, origin: RequestOrigin, reason: Reason, code: str) -> None:
        """Log a request that ended while it waited for its model, or that was refused because no
        model of that name exists."""
        self._state["submitted"] = True
        ended = trio.current_time()
        record = RequestRecord(
            request_id=self.request_id,
            reason=reason,
            code=code,
            arrived_at=origin.at,
            ended_at=ended,
        )
        self.request_log.note(origin, record)

    def entries(self) -> Sequence[ModelEntry]:
        """The models that the key of this request may use, its default first."""
        return self.entries_for(self.key or ANYBODY)

    def entries_for(self, key: ApiKey) -> Sequence[ModelEntry]:
        """The models that a key may use."""
        return [entry for entry in self.models.entries() if key.may_use(entry.names)]

    def listed(self, model: str | None) -> ModelEntry:
        """Return the entry of a model; None: the default. Raises `RequestFailed` (404), also for a
        model that the key may not use."""
        return named(model, self.entries())

    def resolved(self, model: str) -> str:
        """Return the name of the model that answers to a name (--model-alias), among those that the
        key may use."""
        return self.aliases.resolved(model, self.entries())

    def omits_tools(self, tools: Tools, served: Served) -> bool:
        """Whether the model is not to see the tools of this request, since it could not call them.
        Raises `RequestFailed` (400)."""
        return self._tool_support.omits(tools, served.name, served.runtime)

    def parsers(self, served: Served, tools: Tools, answer: Answer) -> Callable[[], OutputParser]:
        """Return what makes the parser of each choice. `answer`: one of the answers, all of which
        have the same prompt."""
        tokenizer = served.runtime.tokenizer
        thinks = thinks_already(answer.accepted.prompt_tokens, tokenizer)
        report = partial(self.malformed_calls.note, served.name)
        return partial(OutputParser, tools, tokenizer, thinks=thinks, report=report)

    async def tokens(self, served: Served, prompt: Prompt) -> tuple[int, ...]:
        """Tokenize a prompt whose tokens are the answer, or are counted. Raises `RequestFailed`
        (400, 413, 429, 503)."""
        self.hold(TOKENIZED_BYTES * self.body_bytes)
        return await served.runtime.tokens(prompt, self.tenant)

    # -- answers ----------------------------------------------------------------------------------

    async def submit(
        self, served: Served, generates: Sequence[Generate], priority: int | None
    ) -> list[Answer]:
        """Submit the requests: admission comes before a response exists. Admitted answers are
        closed with the HTTP request, however it ends. `priority` None: that of the API key. Lines
        of batches come last, and wait without a limit."""
        key = self.key or ANYBODY
        if self.batch_owner is None:
            priority = priority_with(key, priority)
        else:
            priority = BATCH_PRIORITY
            generates = [attrs.evolve(generate, timeouts=Timeouts()) for generate in generates]
        self.begin(served.name, len(generates))
        self._name_parts(generates)
        generates = [
            attrs.evolve(
                generate,
                priority=priority,
                tenant=self.tenant,
                cache_scope=CacheScope(group=key.cache_group, adapter=generate.cache_scope.adapter),
                as_room_allows=not self.settings.strict or generate.as_room_allows,
                adapter=served.adapter,
            )
            for generate in generates
        ]
        await self.begin_line()
        at_once, answers = served.runtime.settings.rows, list[Answer]()
        # More would fill the queue, which is all clients'.
        for start in range(0, len(generates), at_once):
            sent = [
                await self._send(served, generate)
                for generate in generates[start : start + at_once]
            ]
            for answer in sent:
                await answer.wait_accepted()
            answers += sent
        lengths = [
            generate.max_tokens or 0 if generate.names_length else 0 for generate in generates
        ]
        accepted = [answer.accepted.max_tokens for answer in answers]
        if not self.settings.strict and any(
            new < old for new, old in zip(accepted, lengths, strict=True)
        ):
            self.read_past.skip("max_tokens")
            self.note_ignored()
        return answers

    async def _send(self, served: Served, generate: Generate) -> Answer:
        self._state["submitted"] = True
        reservation, holding = self.reserve(served.name), self.holding

        def admit(prompt_tokens: int, max_tokens: int, named: bool) -> int:
            scores = -1 if generate.prompt_logprobs is None else generate.prompt_logprobs
            holding.take(prompt_tokens * (TOKEN_BYTES + SCORE_BYTES * (scores + 1)))
            return reservation.admit(prompt_tokens, max_tokens, named)

        def ended(record: RequestRecord) -> None:
            reservation.end(record)
            self.request_log.note(served.origin, record)

        answer = await served.runtime.send(generate, ended, admit)
        self.at_end(self.running.add(self.key_identity, self.request_id, answer))
        return answer

    def _name_parts(self, generates: Sequence[Generate]) -> None:
        """Name the types of content that a placeholder stands for. Raises `RequestFailed` (400) if
        the server is strict."""
        for name in ignored_parts(generates):
            if self.settings.strict:
                message = (
                    f"content of type {name} is not read: the model reads text only (--strict)"
                )
                raise bad_request(message, "messages", "images_not_supported")
            self.read_past.skip(name)
        self.note_ignored()

    def cancel(self, request_id: str) -> bool:
        """Cancel the answers of a request of this key (of any, with `admin`), given the id of its
        X-Request-Id header or of its response body. Clients that wait for these answers get an
        error."""
        return self.running.cancel(
            request_id, None if self.has_right("admin") else self.key_identity
        )

    async def respond(
        self,
        dialect: Dialect,
        answers: Sequence[Answer],
        *,
        stream: bool,
        before_end: Callable[[], Awaitable[None]] = at_once,
    ) -> Response:
        """`before_end` is awaited before the client hears of the end."""
        if not stream:
            choices = await collect_all(answers, self.holding.grow)
            response = await formatted(lambda: dialect.body(choices), is_long=is_long(choices))
            await before_end()
            return response
        nursery, heartbeat_s = (
            cast("trio.Nursery", self._state["nursery"]),
            self.settings.heartbeat_s,
        )
        events = EventStream(
            dialect,
            answers,
            heartbeat_s,
            nursery,
            self._direct(),
            hold=self.hold,
            before_end=before_end,
        )
        return as_events(await events.waited())

    def _direct(self) -> tuple[SocketWriter, StepDelivery] | None:
        """Return what writes the text of a stream around the layers between: where the guard lends
        its writer, and the body of the response will be chunked."""
        writer = cast("SocketWriter | None", self._state.get(WRITER))
        if writer is None or request.scope["http_version"] != "1.1":
            return None
        return writer, self.delivery


def _bounded_header(header: str) -> str:
    """Return the header as the request log keeps it. A long one is dropped, because it would cost
    memory for as long as its record is kept; W3C allows dropping trace state beyond this length."""
    return header if len(header) <= MAX_HEADER_CHARS else ""


async def _owning(owned: ExitStack, work: Callable[[], Awaitable[None]]) -> None:
    """Run background work and release its resources. An exception is logged and affects no other
    request."""
    with owned:
        try:
            await work()
        except Exception:
            log.exception("work in the background failed; the rest goes on")


def as_json(body: Any, status: int = 200) -> Response:
    return encoded(msgspec.json.encode(body), status)


async def formatted(body: Callable[[], Any], *, is_long: bool) -> Response:
    """Format and encode a body, in a thread if that takes long."""
    if not is_long:
        return as_json(body())
    return encoded(await trio.to_thread.run_sync(lambda: msgspec.json.encode(body())))


def encoded(data: bytes, status: int = 200) -> Response:
    """Build a response from JSON that is encoded already."""
    return Response(data, status, content_type="application/json")


def as_events(body: ResponseBody) -> Response:
    """Build a response of server-sent events without a time limit."""
    response = Response(body, content_type="text/event-stream; charset=utf-8")
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    response.timeout = None
    return response


def now() -> int:
    """The current time in Unix seconds."""
    return int(time.time())
