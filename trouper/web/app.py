"""The Quart-Trio app: routes, and what every request passes through. Mountable in another program."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast
from uuid import uuid4

import attrs
import msgspec
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ConnectionState
from quart import Response, request
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge, RequestTimeout

from trouper.actors.runtime import Answer, Runtime
from trouper.protocol.errors import RequestFailed, bad_request
from trouper.protocol.requests import Generate
from trouper.protocol.settings import ServerSettings
from trouper.web.answers import EventStream, collect_all
from trouper.web.auth import Keys
from trouper.web.errors import error_response, http_problem, model_not_found
from trouper.web.health import health_body
from trouper.web.openai.chat import chat_to_generate, parse_chat
from trouper.web.openai.completions import CompletionRequest, best_of, completion_to_generate, parse_completion
from trouper.web.openai.parameters import Parameters, wants_usage
from trouper.web.openai.shapes import ChatShape, CompletionShape, Envelope, Shape, total
from trouper.web.openai.voice import Voice, thinks_already
from trouper.web.parsing import parse_json, too_large
from trouper.web.tokens import parse_detokenize, parse_tokenize, text_of, tokens_of

log = logging.getLogger("trouper.web")

REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class HTTPConnection(TrioASGIHTTPConnection):
    """Outlives its handler: owns what the handler acquired and started, and finishes the last write.

    If the client leaves between the handler's return and the body's first byte, nobody else would
    close the answers. The last write is followed by events that cancel the handler; without the
    shield the connection would never hear that it is idle again.
    """

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def finish(message: Any) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            with trio.CancelScope(shield=last):
                await send(message)

        async with trio.open_nursery() as nursery:
            with ExitStack() as owned:
                state = cast("dict[str, Any]", self.scope.setdefault("state", ConnectionState({})))
                state["owned"], state["nursery"] = owned, nursery
                await super().__call__(receive, cast("ASGISendCallable", finish))
            nursery.cancel_scope.cancel()


class App(QuartTrio):
    asgi_http_class = HTTPConnection


def create_app(runtime: Runtime, settings: ServerSettings) -> App:
    """The whole API for one runtime. Raises `SettingsInvalid` for a bad key file."""
    app = App("trouper", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    app.config["BODY_TIMEOUT"] = settings.body_timeout_s
    app.config["RESPONSE_TIMEOUT"] = None
    api = Api(runtime, settings)
    app.before_request(api.let_in)
    app.after_request(api.sign)
    app.register_error_handler(HTTPException, api.http_error)
    app.register_error_handler(RequestFailed, api.failed)
    app.register_error_handler(Exception, api.crashed)
    app.add_url_rule("/v1/chat/completions", "chat", api.chat, methods=["POST"])
    app.add_url_rule("/v1/completions", "completions", api.completions, methods=["POST"])
    app.add_url_rule("/v1/requests/<request_id>/cancel", "cancel", api.cancel, methods=["POST"])
    app.add_url_rule("/tokenize", "tokenize", api.tokenize, methods=["POST"])
    app.add_url_rule("/detokenize", "detokenize", api.detokenize, methods=["POST"])
    app.add_url_rule("/v1/models", "models", api.models)
    app.add_url_rule("/v1/models/<path:model>", "model", api.model)
    app.add_url_rule("/health", "health", api.health)
    app.add_url_rule("/livez", "livez", api.livez)
    app.add_url_rule("/readyz", "readyz", api.readyz)
    return app


def as_json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, content_type="application/json")


async def body_bytes() -> bytes:
    """The request's body. Too slow or too large, it raises werkzeug's 408 or 413."""
    return cast("bytes", await request.get_data(as_text=False))


class Api:
    """The handlers, and the little they share."""

    def __init__(self, runtime: Runtime, settings: ServerSettings) -> None:
        self._runtime, self._settings = runtime, settings
        self._keys = Keys.of(settings)
        self._name = settings.served_model_name or runtime.model.id
        self._running: dict[str, set[Answer]] = {}
        self._fingerprint = f"fp_{runtime.model.architecture}_{runtime.model.dtype}"

    # -- every request ---------------------------------------------------------------------------

    async def let_in(self) -> Response | None:
        headers = request.headers
        problem = self._keys.problem(request.path, headers.get("Authorization"), headers.get("X-Api-Key"))
        return None if problem is None else error_response(problem)

    async def sign(self, response: Response) -> Response:
        response.headers["X-Request-Id"] = self._request_id()
        return response

    def _request_id(self) -> str:
        """The client's own if it is sane, else a new one; the same throughout the request."""
        state = cast("dict[str, Any]", request.scope["state"])
        if "request_id" not in state:
            given = request.headers.get("X-Request-Id", "")
            state["request_id"] = given if REQUEST_ID.fullmatch(given) else uuid4().hex
        return cast("str", state["request_id"])

    async def http_error(self, error: HTTPException) -> Response:
        if isinstance(error, RequestEntityTooLarge):
            return error_response(too_large(self._settings.max_body_bytes))
        if isinstance(error, RequestTimeout):
            return error_response(
                http_problem(408, "the body did not arrive in time (--body-timeout-s)", "body_timeout")
            )
        status = error.code or 500
        said = {
            404: f"there is nothing at {request.path}",
            405: f"{request.method} is not for {request.path}",
        }.get(status, error.description or error.name)
        response = error_response(http_problem(status, said))
        if status == 405:
            response.headers["Allow"] = dict(error.get_headers()).get("Allow", "")
        return response

    async def failed(self, error: RequestFailed) -> Response:
        return error_response(error.problem)

    async def crashed(self, error: Exception) -> Response:
        log.error("request %s failed", self._request_id(), exc_info=error)
        return error_response(
            http_problem(500, "an internal error; the log has it under the request id", "internal_error")
        )

    # -- generation ------------------------------------------------------------------------------

    async def chat(self) -> Response:
        parsed = parse_chat(parse_json(await body_bytes()))
        self._check_model(parsed.model)
        wanted = chat_to_generate(parsed, self._request_id(), self._runtime.settings.seed)
        wants_usage(parsed)
        tools, words = parsed.tools_asked, self._runtime.tokenizer
        if tools.offered and not tools.forced and words.calling is None:
            said = (
                "this model has not learnt to call tools by itself; tool_choice required or a named tool forces a call"
            )
            raise bad_request(said, "tools", "tools_not_supported")
        answers = [await self._submit(generate) for generate in wanted]
        voice: Callable[[], Voice] | None = None
        if tools.offered or words.thinking is not None:
            thinks = thinks_already(answers[0].accepted.prompt_tokens, words)
            voice = partial(Voice, tools, words, thinks=thinks)
        shape = ChatShape(self._envelope("chatcmpl-"), voice)
        return await self._answer(shape, parsed, answers, logprobs=wanted[0].logprobs is not None)

    async def completions(self) -> Response:
        parsed = parse_completion(parse_json(await body_bytes()))
        self._check_model(parsed.model)
        wanted = completion_to_generate(parsed, self._request_id(), self._runtime.settings.seed)
        wants_usage(parsed)
        answers = [await self._submit(generate) for generate in wanted]
        shape = CompletionShape(self._envelope("cmpl-"))
        return await self._answer(shape, parsed, answers, logprobs=wanted[0].logprobs is not None)

    async def _answer(self, shape: Shape, parsed: Parameters, answers: list[Answer], *, logprobs: bool) -> Response:
        include_usage = wants_usage(parsed)
        if not parsed.stream:
            return as_json(await self._whole(shape, parsed, answers, logprobs=logprobs))
        stream = EventStream(
            shape,
            answers,
            choices=parsed.n,
            include_usage=include_usage,
            heartbeat_s=self._settings.heartbeat_s,
            nursery=self._state()["nursery"],
        )
        response = Response(stream, content_type="text/event-stream; charset=utf-8")
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"
        response.timeout = None
        return response

    async def _whole(self, shape: Shape, parsed: Parameters, answers: list[Answer], *, logprobs: bool) -> Any:
        candidates = parsed.candidates if isinstance(parsed, CompletionRequest) else parsed.n
        choices = await collect_all(answers, logprobs=logprobs)
        usage = total([choice.usage for choice in choices], candidates)
        if isinstance(parsed, CompletionRequest) and candidates > parsed.n:
            choices = best_of(choices, parsed.n, candidates)
            if parsed.logprobs is None:
                choices = [attrs.evolve(choice, logprobs=None) for choice in choices]
        return shape.body(choices, usage)

    async def _submit(self, generate: Generate) -> Answer:
        """Admission comes before a response exists. What was admitted is closed with the request, however that ends."""
        answer = await self._runtime.submit(generate)
        running = self._running.setdefault(self._request_id(), set())
        running.add(answer)
        self._state()["owned"].callback(self._ended, self._request_id(), answer)
        return answer

    def _ended(self, request_id: str, answer: Answer) -> None:
        answer.close()
        running = self._running[request_id]
        running.discard(answer)
        if not running:
            del self._running[request_id]

    async def cancel(self, request_id: str) -> Response:
        """By the id of the response's X-Request-Id header, or of its body. Whoever waits for it is told."""
        found = self._running.get(request_id) or self._running.get(request_id.partition("-")[2])
        if found is None:
            problem = http_problem(404, f"no running request has the id {request_id!r}", "request_not_found")
            return error_response(problem)
        for answer in found:
            answer.cancel()
        return as_json({"id": request_id, "object": "request.cancelled", "cancelled": True})

    async def tokenize(self) -> Response:
        parsed = parse_tokenize(parse_json(await body_bytes()))
        self._check_model(parsed.model)
        tokens = await tokens_of(parsed, self._runtime.tokenizer)
        context = self._runtime.model.context_length
        return as_json({"count": len(tokens), "max_model_len": context, "tokens": tokens})

    async def detokenize(self) -> Response:
        parsed = parse_detokenize(parse_json(await body_bytes()))
        self._check_model(parsed.model)
        return as_json({"prompt": text_of(parsed, self._runtime.tokenizer, self._runtime.model.vocab_size)})

    def _state(self) -> dict[str, Any]:
        return cast("dict[str, Any]", request.scope["state"])

    def _envelope(self, prefix: str) -> Envelope:
        return Envelope(
            id=prefix + self._request_id(),
            created=int(time.time()),
            model=self._name,
            fingerprint=self._fingerprint,
            tokenizer=self._runtime.tokenizer,
        )

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in (self._name, self._runtime.model.id):
            raise model_not_found(model, self._name)

    # -- facts -----------------------------------------------------------------------------------

    async def models(self) -> Response:
        return as_json({"object": "list", "data": [self._model_body()]})

    async def model(self, model: str) -> Response:
        self._check_model(model)
        return as_json(self._model_body())

    def _model_body(self) -> dict[str, Any]:
        card = self._runtime.model
        return {
            "id": self._name,
            "object": "model",
            "created": card.created,
            "owned_by": "trouper",
            "max_model_len": card.context_length,
        }

    async def health(self) -> Response:
        return as_json(health_body(self._runtime.health()))

    async def livez(self) -> Response:
        return as_json({"status": "alive"})

    async def readyz(self) -> Response:
        health = self._runtime.health()
        return as_json({"status": health.status, "detail": health.detail}, 200 if health.ready else 503)
