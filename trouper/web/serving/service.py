"""Leases models, submits requests and formats responses for every dialect."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import attrs
import trio
from quart import Response, request
from quart.wrappers.response import ResponseBody

from trouper.actors.request_intake import thinks_already
from trouper.actors.runtime.answer import Answer
from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import ModelEntry, Models, named
from trouper.protocol.api_keys import ANYBODY, NO_KEYS, ApiKey, Keys
from trouper.protocol.grammar import Grammar
from trouper.protocol.media import ImageSource
from trouper.protocol.names import NO_ALIASES
from trouper.protocol.problems import RequestFailed, bad_request
from trouper.protocol.record import Reason, RequestRecord
from trouper.protocol.requests import (
    BATCH_PRIORITY,
    CacheScope,
    ChatPrompt,
    Generate,
    PairTokens,
    Prompt,
    Timeouts,
    ignored_parts,
)
from trouper.protocol.sampling import SamplingDefaults
from trouper.protocol.settings import ServerSettings
from trouper.web.http.image_source import ImageParts, RemoteImage, UploadedImage
from trouper.web.http.json_response import formatted
from trouper.web.http.media_fetch import MediaFetcher
from trouper.web.http.socket_writer import SocketWriter
from trouper.web.observability.access_log import log_prompts
from trouper.web.observability.exchange import Exchange
from trouper.web.observability.request_log import MalformedCalls, RequestLog, RequestOrigin
from trouper.web.output.dialect import Dialect
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.tool_calls import Tools
from trouper.web.serving.current_request import CurrentRequest, priority_with
from trouper.web.serving.model_names import ModelAliases, agreed_adapter, split_adapter
from trouper.web.serving.running_requests import RunningRequest, RunningRequests
from trouper.web.serving.tool_support import can_call_tools, notice, why_not
from trouper.web.streaming.response_streams import (
    SCORE_BYTES,
    EventStream,
    at_once,
    collect_all,
    is_long,
)
from trouper.web.streaming.step_delivery import StepDelivery

log = logging.getLogger("trouper.web")
TOKEN_BYTES = 40  # Bytes of a waiting prompt's token: an integer and a tuple's slot.
TOKENIZED_BYTES = 64


ReadUpload = Callable[[str, str], Awaitable[bytes]]
"""Returns the bytes of an uploaded image by file id and path of the part. Raises `RequestFailed`
(400, 404, 413, 503)."""


async def no_uploads(_: str, path: str) -> bytes:
    raise bad_request(
        f"{path}: this server keeps no files (--no-batches): send the image as a data URL",
        path,
        "files_not_supported",
    )


@attrs.frozen(eq=False)
class Served:
    runtime: Runtime
    origin: RequestOrigin

    @property
    def name(self) -> str:
        return f"{self.origin.model}:{self.adapter}" if self.adapter else self.origin.model

    @property
    def adapter(self) -> str:
        """Name of the LoRA adapter that answers; "" is the model itself."""
        return self.origin.adapter

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return SamplingDefaults(self.runtime.settings.seed, self.runtime.model.sampling_defaults)

    @property
    def fingerprint(self) -> str:
        card = self.runtime.model
        return f"fp_{card.architecture}_{card.dtype}"


class Service(CurrentRequest):
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
        self.running = RunningRequests()
        self.delivery = StepDelivery()
        """Runs only under `serve_http`: no nursery of another program could end before."""
        self.malformed_calls = MalformedCalls()
        self.aliases = ModelAliases(models, NO_ALIASES if settings.strict else settings.model_alias)
        self.read_upload: ReadUpload = no_uploads
        self._media = MediaFetcher(settings.allowed_media_domains)
        self._reported: set[str] = set()

    @property
    def has_background(self) -> bool:
        return self._background is not None

    def run_in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` beyond the connection, then release the request's resources."""
        assert self._background is not None
        if self.scope.exchange is not None:
            self.scope.exchange.in_background = True
        self._background.start_soon(_owning, self.scope.owned.pop_all(), work)

    # -- models -----------------------------------------------------------------------------------

    async def served(self, model: str | None, adapter: str | None = None) -> Served:
        """Lease a model by name or alias (None: the default) until the request's end. `adapter`
        counts if the name has none. Raises `RequestFailed` (404, 503)."""
        if self.scope.exchange is not None:
            self.scope.exchange.model = model or ""
        model, named = split_adapter(model, self.entries())
        model = None if model is None else self.resolved(model)
        origin = self._origin(model, named, adapter)
        model = origin.model if model is None else model
        running = self.scope.running or self._open_running(origin)
        running.history.note("preparing", "model")
        try:
            lease = await self.models.lease(model)
        except RequestFailed as failed:
            self._unserved(origin, "refused", failed.problem.code or failed.problem.type)
            raise
        except trio.Cancelled:
            self._unserved(origin, "abort", "")
            raise
        running.history.note("preparing")
        self.at_end(lease.release)
        return Served(lease.runtime, origin)

    def _open_running(self, origin: RequestOrigin) -> RunningRequest:
        self.scope.running = running = self.running.open(self.key_identity, self.request_id, origin)
        self.at_end(self.running.close, running)
        self.at_end(log_prompts, self.request_id, running.records)
        return running

    def _origin(self, model: str | None, named: str, adapter: str | None) -> RequestOrigin:
        entry = self.listed(model)
        adapter = agreed_adapter(named, adapter, entry)
        return RequestOrigin(
            entry.names[0],
            request.path,
            trio.current_time(),
            adapter=adapter,
            key=self.key_label,
        )

    def _unserved(self, origin: RequestOrigin, reason: Reason, code: str) -> None:
        self.scope.submitted = True
        ended = trio.current_time()
        record = RequestRecord(
            request_id=self.request_id,
            reason=reason,
            code=code,
            arrived_at=origin.at,
            ended_at=ended,
        )
        self._note_end(origin, record, self.scope.exchange)

    def _note_end(
        self, origin: RequestOrigin, record: RequestRecord, exchange: Exchange | None
    ) -> RequestRecord:
        complete = self.request_log.note(origin, record)
        if exchange is not None:
            exchange.records.append(complete)
        return complete

    def note_response_id(self, response_id: str) -> None:
        if self.scope.running is not None:
            self.scope.running.names.add(response_id)
        if self.scope.exchange is not None:
            self.scope.exchange.response_id = response_id

    def entries(self) -> Sequence[ModelEntry]:
        return self.entries_for(self.key or ANYBODY)

    def entries_for(self, key: ApiKey) -> Sequence[ModelEntry]:
        return [entry for entry in self.models.entries() if key.may_use(entry.names)]

    def listed(self, model: str | None) -> ModelEntry:
        """Return a model's entry (None: the default). Raises `RequestFailed` (404), also for a
        model forbidden to the key."""
        return named(model, self.entries())

    def resolved(self, model: str) -> str:
        """Resolve --model-alias."""
        return self.aliases.resolved(model, self.entries())

    def omits_tools(self, tools: Tools, served: Served) -> bool:
        """Whether the request's tools are dropped and reported. A forced call needs a grammar and
        no training. Raises `RequestFailed` (400) if the server is strict."""
        tokenizer = served.runtime.tokenizer
        if not tools.offered or tools.forced or can_call_tools(tokenizer):
            return False
        if self.settings.strict:
            message = (
                f"tools: {why_not(served.name, tokenizer)} (--strict); a tool_choice "
                "that requires a call works"
            )
            raise bad_request(message, "tools", "tools_not_supported")
        self.read_past.skip("tools")
        self.note_ignored()
        self.warn_once(f"{notice(served.name, served.runtime)} (logged once)")
        return True

    def parsers(self, served: Served, tools: Tools, answer: Answer) -> Callable[[], OutputParser]:
        """Return a factory of choices' parsers. `answer` is any of the answers to the prompt."""
        tokenizer = served.runtime.tokenizer
        thinks = thinks_already(answer.accepted.prompt_tokens, tokenizer)
        report = partial(self.malformed_calls.note, served.name)
        return partial(OutputParser, tools, tokenizer, thinks=thinks, report=report)

    async def tokens(self, served: Served, prompt: Prompt) -> tuple[int, ...]:
        """Tokenize a prompt for sending or counting. Raises `RequestFailed` (400, 413, 429,
        503)."""
        self.hold(TOKENIZED_BYTES * self.scope.body_bytes)
        return await served.runtime.tokens(prompt, self.tenant)

    # -- images -----------------------------------------------------------------------------------

    @property
    def body_limit(self) -> int:
        loaded = [entry.runtime for entry in self.models.entries() if entry.runtime is not None]
        takes_images = any(runtime.model.images is not None for runtime in loaded)
        return self.settings.body_limit(images=takes_images)

    def image_roles(self, served: Served) -> frozenset[str]:
        card = served.runtime.model
        return frozenset() if card.images is None else frozenset(card.image_roles)

    def image_parts(self, served: Served) -> ImageParts:
        check = self._media.check if self._media.is_on else None
        return ImageParts(self.image_roles(served), check)

    async def with_images(
        self, choices: Sequence[Generate], images: ImageParts
    ) -> tuple[Generate, ...]:
        """Give choices of one conversation the images that `images` has read. Raises
        `RequestFailed` (400, 404, 413, 429, 503)."""
        if not images.sources:
            return tuple(choices)
        prompt = await self.prompt_with_images(choices[0].prompt, images)
        return tuple(attrs.evolve(choice, prompt=prompt) for choice in choices)

    async def prompt_with_images(self, prompt: Prompt, images: ImageParts) -> Prompt:
        if not images.sources or not isinstance(prompt, ChatPrompt):
            return prompt
        remote = [image for image in images.sources if isinstance(image, RemoteImage)]
        fetched = await self._fetched(remote)
        sources = [await self._source(image, fetched) for image in images.sources]
        return attrs.evolve(prompt, images=tuple(sources))

    async def _source(
        self, image: ImageSource | UploadedImage | RemoteImage, fetched: Mapping[str, bytes]
    ) -> ImageSource:
        if isinstance(image, ImageSource):
            return image
        if isinstance(image, RemoteImage):
            return ImageSource(fetched[image.url], image.origin, image.detail)
        data = await self.read_upload(image.file_id, image.origin)
        return ImageSource(data, image.origin, image.detail)

    async def _fetched(self, images: Sequence[RemoteImage]) -> dict[str, bytes]:
        """Return files by address. Raises `RequestFailed` (400, 413, 429, 503)."""
        if not images:
            return {}
        self.takes_long()
        return await self._media.fetch_all(images, self.hold, self.scope.read_once)

    # -- answers ----------------------------------------------------------------------------------

    async def submit(
        self, served: Served, generates: Sequence[Generate], priority: int | None
    ) -> list[Answer]:
        """Submit requests and wait for admission. `priority` None is the key's. Batch lines come
        last and wait without a limit. Raises `RequestFailed`."""
        key = self.key or ANYBODY
        if self.batch_owner is None:
            priority = priority_with(key, priority)
        else:
            priority = BATCH_PRIORITY
            generates = [attrs.evolve(generate, timeouts=Timeouts()) for generate in generates]
        self.begin(served.name, len(generates))
        self._name_parts(generates, served)
        generates = [
            attrs.evolve(
                generate,
                priority=priority,
                tenant=self.tenant,
                cache_scope=CacheScope(group=key.cache_group, adapter=generate.cache_scope.adapter),
                as_room_allows=not self.settings.strict or generate.as_room_allows,
                adapter=served.adapter,
                grammar=self._grammar(generate),
            )
            for generate in generates
        ]
        if self.scope.exchange is not None:
            self.scope.exchange.note_submission(generates)
        await self.begin_line()
        prompts = [generate.prompt for generate in generates]
        tokens = await served.runtime.tokenize_together(prompts, self.tenant)
        at_once, answers = served.runtime.settings.rows, list[Answer]()
        # More would fill the queue, which is all clients'.
        for start in range(0, len(generates), at_once):
            sent = [
                await self._send(served, generate, tokens.get(id(generate.prompt), ((), 0)))
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
        self._name_keywords(path for one in answers for path in one.accepted.ignored)
        # No fault of the body can follow, and a stream would keep megabytes of text.
        self.read_past.adaptations.clear()
        return answers

    async def submit_groups(
        self, served: Served, groups: Iterable[Sequence[Generate]], priority: int | None
    ) -> list[Answer]:
        """As `submit`, each group while the engine computes the one before."""
        answers, ahead = list[Answer](), list[Answer]()
        for group in groups:
            queued = await self.submit(served, group, priority)
            for answer in ahead:
                await answer.wait_next()
            answers += queued
            ahead = queued
        return answers

    def _grammar(self, generate: Generate) -> Grammar | None:
        """Return the request's grammar, of which a strict server drops nothing."""
        if generate.grammar is None or not self.settings.strict:
            return generate.grammar
        return attrs.evolve(generate.grammar, strict=True)

    async def _send(self, served: Served, generate: Generate, tokens: PairTokens) -> Answer:
        self.scope.submitted = True
        reservation, holding = self.reserve(served.name), self.holding
        exchange = self.scope.exchange
        # A program's own model was not leased by `served`.
        running = self.scope.running or self._open_running(served.origin)

        def admit(prompt_tokens: int, max_tokens: int, named: bool) -> int:
            scores = -1 if generate.prompt_logprobs is None else generate.prompt_logprobs
            holding.take(prompt_tokens * (TOKEN_BYTES + SCORE_BYTES * (scores + 1)))
            return reservation.admit(prompt_tokens, max_tokens, named)

        def ended(record: RequestRecord) -> None:
            reservation.end(record)
            running.records.append(self._note_end(served.origin, record, exchange))

        answer = await served.runtime.send(generate, ended, admit, tokens)
        running.answers.append(answer)
        # After the lease: answers are closed before their model may go.
        self.at_end(answer.close)
        return answer

    def _name_parts(self, generates: Sequence[Generate], served: Served) -> None:
        why = served.runtime.model.no_images
        for name in ignored_parts(generates):
            if self.settings.strict:
                reader = "this role" if self.image_roles(served) else "the model"
                message = f"content of type {name} is not read: {reader} reads text only (--strict)"
                message += f"; {why}" if why else ""
                raise bad_request(message, "messages", "images_not_supported")
            self.read_past.skip(name)
            if why:
                self.warn_once(f"{served.origin.model} reads no images: {why}")
        self.note_ignored()

    def warn_once(self, message: str) -> None:
        """`message` names a model or another thing of which there are few."""
        if message not in self._reported:
            self._reported.add(message)
            log.warning("%s", message)

    def _name_keywords(self, paths: Iterable[str]) -> None:
        """Name the keywords of schemas that no grammar follows. A strict server drops none, and
        refuses those that are unknown (400)."""
        for path in paths:
            if self.settings.strict:
                raise bad_request(f"unknown keyword {path!r}", path, "unknown_parameter")
            self.read_past.skip(path)
        self.note_ignored()

    @property
    def manageable_owner(self) -> str | None:
        """Identity of the key whose requests may be seen and cancelled; None (`admin`): all."""
        return None if self.has_right("admin") else self.key_identity

    def ended_records(self, request_id: str) -> list[RequestRecord]:
        """Return the records of an ended request's choices that this key may see."""
        seen = self.request_log.of(self.running.ended_id(request_id))
        everyone = self.manageable_owner is None
        return [record for record in seen if everyone or record.key == self.key_label]

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
        events = EventStream(
            dialect,
            answers,
            self.settings.heartbeat_s,
            self.scope.nursery,
            self._direct(),
            hold=self.hold,
            before_end=before_end,
        )
        return as_events(await events.waited())

    def _direct(self) -> tuple[SocketWriter, StepDelivery] | None:
        writer = self.scope.writer
        if writer is None or request.scope["http_version"] != "1.1":
            return None
        return writer, self.delivery


async def _owning(owned: ExitStack, work: Callable[[], Awaitable[None]]) -> None:
    with owned:
        try:
            await work()
        except Exception:
            log.exception("work in the background failed; the rest goes on")


def as_events(body: ResponseBody | AsyncIterator[bytes] | bytes) -> Response:
    response = Response(body, content_type="text/event-stream; charset=utf-8")
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    return response


def now() -> int:
    return int(time.time())
