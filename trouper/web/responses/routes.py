from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import attrs
import msgspec
import trio
from quart import Response, request
from werkzeug.routing import BaseConverter

from trouper.actors.runtime.answer import Answer
from trouper.protocol.problems import Problem, RequestFailed, bad_request
from trouper.protocol.replies import Delta
from trouper.protocol.requests import ChatPrompt, Generate
from trouper.web.http.body_parsing import between, called, combination
from trouper.web.http.endpoints import COUNTS, GENERATES, Endpoint
from trouper.web.http.field_types import HUGE
from trouper.web.http.json_response import as_json, formatted
from trouper.web.http.query_parameters import ORDERS, Query, page_body
from trouper.web.http.request_schema import FLAG, TEXT, ref
from trouper.web.output.call_or_answer import with_calls
from trouper.web.output.dialect import COMMENT, Json
from trouper.web.output.tool_calls import Tools
from trouper.web.responses.call_items import PREFIXES
from trouper.web.responses.items import (
    check_outputs,
    has_images,
    items_of,
    messages_of,
    references_of,
    with_files,
    with_placeholders,
)
from trouper.web.responses.response_events import ResponseDialect, full_context_events, head_of
from trouper.web.responses.response_request import (
    ResolvedRequest,
    ResponseRequest,
    parse_response,
    response_to_generate,
)
from trouper.web.responses.response_store import ResponseStore, StoredResponse
from trouper.web.responses.schemas import COUNTED, DELETED, INPUT_ITEMS
from trouper.web.serving.service import Served, Service, as_events
from trouper.web.serving.state_database import StateDatabase
from trouper.web.streaming.event_log import EventLog, replayed
from trouper.web.streaming.response_streams import DELTA_BYTES, Hold, at_once

ENDPOINT = partial(Endpoint, tag="Responses")
MAX_PAGE, DEFAULT_PAGE = 100, 20
REPLAY_QUERY: Json = {
    "stream": FLAG,
    "starting_after": {"type": "integer", "minimum": 0, "maximum": HUGE},
    "include_obfuscation": {"enum": [False]},
}
PAGE_QUERY: Json = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
    "order": {"enum": [*ORDERS], "default": "desc"},
    "after": TEXT,
}
STOPPED = Problem(
    500, "the server could not finish the response", "server_error", None, "internal_error"
)


@attrs.define(eq=False, kw_only=True)
class Live:
    id: str
    dialect: ResponseDialect
    answer: Answer
    earlier: list[Json]
    previous: str | None
    input: tuple[Json, ...]
    background: bool
    stored: bool
    log: EventLog | None
    owner: str
    hold: Hold
    """Accounts for bytes that a background response keeps."""
    settling: trio.Lock = attrs.field(factory=trio.Lock)
    """Held during the storing of the ended response."""

    def ended(self) -> StoredResponse:
        return StoredResponse(
            self.dialect.response(), self.input, self.previous, self.log, self.owner
        )


async def run(live: Live, settle: Callable[[], Awaitable[None]]) -> None:
    """Run and store a background response; the server's end cancels both."""
    dialect, answer, held = live.dialect, live.answer, 0
    try:
        while isinstance(event := await answer.next(), Delta):
            dialect.text(0, event, answer)
            size = 0 if live.log is None else live.log.size
            live.hold(DELTA_BYTES + size - held)
            held = size
        dialect.ending(0, event, answer)
    except RequestFailed as failed:
        dialect.failure(failed.problem)
    finally:
        dialect.failure(STOPPED)  # Has no effect if the response is over.
    await settle()


PARAMS = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}
"""Parameter names of the runtime, and of this API."""
PROMPT_FACTOR = 3
"""Memory of a prompt from stored items, as a multiple of the items' bytes."""
CONTINUABLE = ("completed", "incomplete")


class ResponseId(BaseConverter):
    """A response id in a path, except the endpoint `input_tokens`.

    A 405 for that path would list the methods of a response.
    """

    regex = r"(?!input_tokens$)[^/]+"


class Responses:
    def __init__(self, service: Service, database: StateDatabase) -> None:
        self._service = service
        self.store = ResponseStore(service.settings, database, lambda: service.key_identities)
        self._live: dict[str, Live] = {}

    # -- create -----------------------------------------------------------------------------------

    @ENDPOINT(
        method="POST",
        path="/v1/responses",
        operation="createResponse",
        summary="Answer, and remember the conversation",
        request=ResponseRequest,
        answer=ref("ResponseObject"),
        events=ref("ResponseEvent"),
        also=GENERATES,
        examples={
            "A question": {"input": "Who was Molière?", "max_output_tokens": 9},
            "In the background": {
                "input": "Who was Molière?",
                "max_output_tokens": 9,
                "background": True,
            },
        },
    )
    async def create(self) -> Response:
        resolved = await self._service.read(parse_response)
        parsed = resolved.request
        stored = (
            parsed.store
            and self._service.settings.stored_responses > 0
            and self._service.batch_owner is None
        )
        self._check_background(parsed, stored)
        earlier = await self._earlier(parsed.previous_response_id)
        items = await self._input(parsed, earlier)
        served, resolved, generate = await self._prepare(resolved, earlier, items)
        items = with_placeholders(items, self._service.image_roles(served))
        if stored and isinstance(generate.prompt, ChatPrompt) and generate.prompt.images:
            items = await self._service.run_off_loop(with_files, items, generate.prompt.images)
        try:
            with called(PARAMS):
                [answer] = await self._service.submit(served, [generate], parsed.priority)
        except RequestFailed as failed:
            if failed.problem.context is None or not parsed.stream or parsed.background:
                raise
            head = head_of(
                resolved, self._service.new_id(PREFIXES["response"]), served.name, stored=False
            )
            return as_events(full_context_events(head, failed.problem))
        live = self._begin(resolved, served, answer, items, earlier, stored=stored)
        if parsed.background:
            return self._in_background(live)
        return await self._service.respond(
            live.dialect, [answer], stream=parsed.stream, before_end=partial(self._settle, live)
        )

    @ENDPOINT(
        method="POST",
        path="/v1/responses/input_tokens",
        operation="countResponseInputTokens",
        summary="How many tokens the input of a response has",
        request=ResponseRequest,
        answer=COUNTED,
        also=COUNTS,
        examples={"A question": {"input": "Who was Molière?"}},
    )
    async def count(self) -> Response:
        """Return the input tokens that a response to the same request would be charged."""
        resolved = await self._service.read(parse_response)
        earlier = await self._earlier(resolved.request.previous_response_id)
        items = await self._input(resolved.request, earlier)
        served, _, generate = await self._prepare(resolved, earlier, items)
        self._service.account(served.name)
        # No other code checks it here.
        if generate.max_tokens is not None and self._service.settings.strict:
            between("max_output_tokens", generate.max_tokens, 1, served.runtime.context_length)
        with called(PARAMS):
            tokens = await self._service.tokens(served, generate.prompt)
        return as_json({"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def _prepare(
        self, resolved: ResolvedRequest, earlier: Sequence[Json], items: Sequence[Json]
    ) -> tuple[Served, ResolvedRequest, Generate]:
        """Lease the model and build the request, without tools that the model cannot call. Raises
        `RequestFailed` (400, 404)."""
        served = await self._service.served(resolved.request.model, resolved.request.adapters)
        if self._service.omits_tools(resolved.tools, served):
            resolved = attrs.evolve(resolved, tools=Tools())
        images = self._service.image_parts(served)
        if images.roles and has_images(earlier):
            self._service.takes_long()
        read = partial(messages_of, earlier=len(earlier))
        messages = await self._service.run_off_loop(
            read, resolved.request.instructions, (*earlier, *items), resolved.tools, images
        )
        tokenizer, defaults = served.runtime.tokenizer, served.sampling_defaults
        request_id = self._service.request_id
        generate = response_to_generate(resolved, messages, request_id, defaults, images.unread)
        [generate] = await self._service.with_images([generate], images)
        [generate] = with_calls([generate], resolved.tools, tokenizer, self._service.report)
        return served, attrs.evolve(resolved, sampling=generate.sampling), generate

    def _check_background(self, parsed: ResponseRequest, stored: bool) -> None:
        if parsed.background and not (stored and self._service.has_background):
            message = (
                "this server keeps no responses (--stored-responses), so none can run in the "
                "background"
            )
            raise bad_request(message, "background", "background_not_supported")

    async def _earlier(self, response_id: str | None) -> list[Json]:
        """Return items of the continued conversation, as part of the prompt. Raises
        `RequestFailed`."""
        if response_id is None:
            return []
        name, missing = "previous_response_id", "previous_response_not_found"
        if await self._running(response_id) is not None:
            raise bad_request(
                f"response {response_id!r} has not ended yet", name, "previous_response_not_ended"
            )
        status = (await self.store.get(response_id, name, missing)).body["status"]
        if status not in CONTINUABLE:
            message = f"response {response_id!r} is {status}; go on from the one before it"
            raise bad_request(message, name, "previous_response_not_completed")
        self._service.hold(PROMPT_FACTOR * await self.store.conversation_bytes(response_id))
        items = await self.store.conversation(response_id)
        if not items:  # The response went meanwhile.
            await self.store.get(response_id, name, missing)
        return items

    async def _input(self, parsed: ResponseRequest, earlier: list[Json]) -> tuple[Json, ...]:
        if parsed.input is None and not earlier:
            raise bad_request("input is required", "input", "missing_required_parameter")
        items = () if parsed.input is None else items_of(parsed.input, await self._referred(parsed))
        if not items and not earlier:
            raise bad_request("input is empty; send at least one item", "input", "invalid_value")
        check_outputs(earlier, items)
        return items

    async def _referred(self, parsed: ResponseRequest) -> dict[str, Json]:
        """Return stored items that the input refers to, as part of the prompt. Raises
        `RequestFailed` (413, 429, 503)."""
        found = dict[str, Json]()
        for item_id in references_of(parsed.input or ()):
            item = None if item_id in found else await self.store.item(item_id)
            if item is not None:
                if has_images([item]):
                    self._service.takes_long()
                data = await self._service.run_off_loop(msgspec.json.encode, item)
                self._service.hold(PROMPT_FACTOR * len(data))
                found[item_id] = item
        return found

    def _begin(
        self,
        resolved: ResolvedRequest,
        served: Served,
        answer: Answer,
        items: tuple[Json, ...],
        earlier: list[Json],
        *,
        stored: bool,
    ) -> Live:
        tokenizer, parsed = served.runtime.tokenizer, resolved.request
        parses = resolved.tools.offered or tokenizer.thinking is not None
        parser = self._service.parsers(served, resolved.tools, answer)() if parses else None
        response_id = self._service.new_id(PREFIXES["response"])
        self._service.note_response_id(response_id)
        log = EventLog() if parsed.background and parsed.stream else None
        head = head_of(resolved, response_id, served.name, stored=stored)
        live = Live(
            id=response_id,
            dialect=ResponseDialect(head, tokenizer, parser, answer, log=log),
            answer=answer,
            earlier=earlier,
            previous=parsed.previous_response_id,
            input=items,
            background=parsed.background,
            stored=stored,
            log=log,
            owner=self._service.key_identity,
            hold=self._service.holding.grow,
        )
        self._live[response_id] = live
        self._service.at_end(self._forget, response_id)
        return live

    def _in_background(self, live: Live) -> Response:
        live.dialect.opening(0, live.answer)
        self._service.run_in_background(partial(run, live, partial(self._settle, live)))
        if live.log is not None:
            return self._replay(live.log, 0, live)
        return as_json(live.dialect.response())

    def _replay(self, log: EventLog, position: int, live: Live | None) -> Response:
        heartbeat = (lambda _: COMMENT) if live is None else live.dialect.heartbeat_behind
        before_end = at_once if live is None else partial(self._settle, live)
        heartbeat_s = self._service.settings.heartbeat_s
        return as_events(replayed(log, position, heartbeat_s, heartbeat, before_end=before_end))

    async def _settle(self, live: Live) -> None:
        """Store an ended response before a client hears of the end, unless the response was
        deleted."""
        async with live.settling:
            if live.id not in self._live or not live.dialect.over:
                return
            # Cancelled with its client, this leaves the response to whoever comes next.
            if live.stored:
                await self.store.add(live.ended(), live.earlier)
            self._forget(live.id)

    def _forget(self, response_id: str) -> None:
        self._live.pop(response_id, None)

    # -- the others -------------------------------------------------------------------------------

    async def _running(self, response_id: str) -> Live | None:
        live = self._own(response_id)
        if live is None or not live.stored:
            return None
        if live.dialect.over:
            await self._settle(live)
            return None
        return live

    def _own(self, response_id: str) -> Live | None:
        live = self._live.get(response_id)
        return live if live is not None and live.owner == self._service.key_identity else None

    @ENDPOINT(
        method="GET",
        path="/v1/responses/<response:response_id>",
        operation="getResponse",
        summary="A response that is stored or still runs",
        also=(400,),
        description="`stream` repeats the events of one that was created with `background` and "
        "`stream`.",
        query=REPLAY_QUERY,
        answer=ref("ResponseObject"),
        events=ref("ResponseEvent"),
    )
    async def get(self, response_id: str) -> Response:
        query = Query(
            request.args, ("stream", "starting_after", "include_obfuscation"), self._service.report
        )
        query.refuse("include_obfuscation", "false")
        live = await self._running(response_id)
        kept = live or await self.store.get(response_id)
        if query.flag("stream"):
            if kept.log is None:
                message = (
                    "only a response that was created with background and stream can be streamed "
                    "later"
                )
                raise combination(message, "stream")
            start = query.number("starting_after", -1, 0, HUGE) + 1
            return self._replay(kept.log, start, live)
        if "starting_after" in request.args:
            raise combination("starting_after needs stream=true", "starting_after")
        return as_json(kept.dialect.response() if isinstance(kept, Live) else kept.body)

    @ENDPOINT(
        method="DELETE",
        path="/v1/responses/<response:response_id>",
        operation="deleteResponse",
        summary="Forget a response",
        also=(400,),
        description="One that still runs is cancelled. What later responses build on stays with "
        "them.",
        answer=DELETED,
    )
    async def delete(self, response_id: str) -> Response:
        Query(request.args, (), self._service.report)
        live = await self._running(response_id)
        if live is None:
            await self.store.get(response_id)
            await self.store.remove(response_id)
        else:
            self._forget(response_id)
            live.dialect.cancel()
        return as_json({"id": response_id, "object": "response", "deleted": True})

    @ENDPOINT(
        method="POST",
        path="/v1/responses/<response:response_id>/cancel",
        operation="cancelResponse",
        summary="Cancel a response that runs",
        also=(400,),
        answer=ref("ResponseObject"),
    )
    async def cancel(self, response_id: str) -> Response:
        """Cancel a running background or streamed response. An ended background response stays
        unchanged."""
        Query(request.args, (), self._service.report)
        live = self._own(response_id)
        if live is not None:
            live.dialect.cancel()
            await self._settle(live)
            return as_json(live.dialect.response())
        body = (await self.store.get(response_id)).body
        if not body["background"]:
            raise bad_request(
                "the response has ended; only one that runs can be cancelled",
                None,
                "response_ended",
            )
        return as_json(body)

    @ENDPOINT(
        method="GET",
        path="/v1/responses/<response:response_id>/input_items",
        operation="listInputItems",
        summary="What went into a response",
        also=(400,),
        query=PAGE_QUERY,
        answer=INPUT_ITEMS,
    )
    async def input_items(self, response_id: str) -> Response:
        query = Query(request.args, ("limit", "order", "after"), self._service.report)
        limit = query.number("limit", DEFAULT_PAGE, 1, MAX_PAGE)
        order = query.choice("order", ORDERS) or "desc"
        kept = await self._running(response_id) or await self.store.get(response_id)
        items = kept.input if order == "asc" else kept.input[::-1]
        ids = [item["id"] for item in items]
        page = page_body(ids, query.given("after"), limit, items.__getitem__, "item_not_found")
        return await formatted(lambda: page, is_long=has_images(items))
