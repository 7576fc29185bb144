"""The Quart-Trio app: routes, and the checks of every request."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, cast

import attrs
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from quart import Request, Response, request
from quart.wrappers.response import DataBody
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers.request import TrioRequest
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge, RequestTimeout

from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.served_models import Models, OneModel
from trouper.protocol.api_keys import ANYBODY, ApiKey, Keys
from trouper.protocol.logs import CURRENT_REQUEST
from trouper.protocol.problems import (
    INTERNAL,
    SYSTEM_SHORTAGE,
    Problem,
    RequestFailed,
    is_shortage,
    shortened,
)
from trouper.protocol.settings import ServerSettings
from trouper.protocol.version import VERSION
from trouper.web.anthropic.errors import anthropic_error, anthropic_status, is_anthropic
from trouper.web.anthropic.message_dialect import COMPONENTS as ANTHROPIC
from trouper.web.anthropic.routes import Anthropic
from trouper.web.batches.batch_routes import COMPONENTS as BATCHES
from trouper.web.batches.batching import Batching
from trouper.web.batches.file_routes import UploadBody
from trouper.web.http.body_parsing import too_large
from trouper.web.http.endpoints import REPORT, Endpoint, endpoints_of
from trouper.web.http.json_response import as_json, error_response, http_problem
from trouper.web.http.loop_shares import metered
from trouper.web.http.meant_paths import is_ollama, meant_path, not_found
from trouper.web.http.paced_body import PacedBody
from trouper.web.http.pages import Pages
from trouper.web.http.plain_http import HEALTH_PATHS
from trouper.web.http.request_schema import TEXT, full
from trouper.web.http.same_origin import UPLOADS, Cors, head_of
from trouper.web.keys.endpoint_rights import access_of, admin_without_key, missing_right
from trouper.web.keys.key_file import KeyFile
from trouper.web.live.site import ASSETS, Site
from trouper.web.metrics.collector import Metrics
from trouper.web.observability.access_log import log_record, log_response
from trouper.web.observability.exchange import UNTRACED, Exchange, ExchangeObserver
from trouper.web.observability.health_report import (
    HEALTH,
    INFO,
    READY,
    STATUS,
    USAGE,
    health_body,
    info_body,
    none_loaded,
    usage_body,
)
from trouper.web.observability.request_log import HEADER, RequestLog, RequestObserver
from trouper.web.openai.adapter_operations import AdapterOperations
from trouper.web.openai.answer_schemas import COMPONENTS as OPENAI
from trouper.web.openai.model_operations import ModelOperations
from trouper.web.openai.request_operations import RequestOperations
from trouper.web.openai.rerank import Reranking
from trouper.web.openai.routes import OpenAi
from trouper.web.responses import schemas as response_schemas
from trouper.web.responses.routes import ResponseId, Responses
from trouper.web.serving.current_request import RequestScope, at_hand
from trouper.web.serving.service import Service
from trouper.web.serving.state_database import StateDatabase
from trouper.web.streaming.step_delivery import StepDelivery

log = logging.getLogger("trouper.web")
LARGE_RESPONSE = 2**16
LAST_RESPONSES_S = 1.0
"""Time for storing the last responses after the models have drained."""
KEY_REMOVED = http_problem(
    401, "the API key that created this batch is not accepted any more", "invalid_api_key"
)


class AppRequest(TrioRequest):
    """Upload bodies go to disk on arrival."""

    body_class = PacedBody

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.method == "POST" and self.path == UPLOADS:
            self.body = UploadBody()


class HTTPConnection(TrioASGIHTTPConnection):
    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if not self.app.config["STRICT"]:
            self.scope = with_meant_path(self.scope)
        await super().__call__(receive, send)

    async def handle_messages(  # type: ignore[override] # As in Quart-Trio.
        self, nursery: trio.Nursery, request: Request, receive: ASGIReceiveCallable
    ) -> None:
        body = cast("PacedBody", request.body)
        await super().handle_messages(nursery, request, body.paced(receive))

    async def handle_request(  # type: ignore[override] # As in Quart-Trio.
        self, nursery: trio.Nursery, request: Request, send: ASGISendCallable
    ) -> None:
        async def finish(message: Any) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last:
                # The end of the stream stands behind chunks that nobody has read.
                cast("PacedBody", request.body).discard()
            # Events that follow the last write cancel the handler. Unshielded, the connection
            # would never learn that it is idle again.
            with trio.CancelScope(shield=True) if last else nullcontext():
                await send(message)
            if exchange is not None:
                rule = request.url_rule
                exchange.note_sent(message, "" if rule is None else rule.rule)

        state: Mapping[str, Any] = self.scope.get("state") or {}
        # A client may disconnect between the handler's return and the first byte of the body, when
        # nothing else would close the answers.
        scope = RequestScope.open(request, state, ExitStack(), nursery)
        exchange = cast("App", self.app).traced(request, scope)
        with at_hand(scope), scope.owned:
            # Quart's refusal of a body and the body refer to each other.
            scope.owned.callback(cast("PacedBody", request.body).clear)
            handled = super().handle_request(nursery, request, cast("ASGISendCallable", finish))
            try:
                await metered(handled, scope.meter)
            finally:
                if exchange is not None:
                    exchange.leave()


def with_meant_path(scope: HTTPScope) -> HTTPScope:
    """Correct a mistyped path below the app's root path."""
    root, path = scope.get("root_path", ""), scope["path"]
    if not path.startswith(f"{root}/"):
        return scope
    return cast("HTTPScope", {**scope, "path": root + meant_path(path.removeprefix(root))})


class App(QuartTrio):
    asgi_http_class = HTTPConnection
    request_class = AppRequest
    delivery: StepDelivery
    """Writes streams' text where the server lends writers; the server starts `run`."""
    batching: Batching | None
    exchange_observers: Sequence[ExchangeObserver] = ()

    def traced(self, request: Request, scope: RequestScope) -> Exchange | None:
        """Return the request's exchange; None: nobody observes."""
        if not self.exchange_observers or request.path in UNTRACED:
            return None
        scope.exchange = exchange = Exchange.open(request, scope.headers, scope.request_id)
        scope.owned.callback(exchange.report, self.exchange_observers)
        return exchange


def create_app(
    models: Runtime | Models,
    settings: ServerSettings,
    background: trio.Nursery | None = None,
    observers: Sequence[RequestObserver] = (),
    clock: Callable[[], float] = trio.current_time,
    *,
    exchange_observers: Sequence[ExchangeObserver] = (),
) -> App:
    """Build the app. Raises `SettingsInvalid` for a bad key file.

    `background` runs batches and work that outlives the connection; without a nursery such requests
    are refused. `observers` get the record of each ended prompt, `exchange_observers` each
    ended HTTP request but probes. `clock` returns seconds, for key limits.
    """
    if isinstance(models, Runtime):
        models = OneModel(models, settings.served_model_name)
    app = _configured(App("trouper", static_folder=None), settings)
    app.exchange_observers = exchange_observers
    keys = Keys.of(settings)
    metrics = Metrics(models.entries)
    request_log = RequestLog(metrics.requests.observe, log_record, *observers)
    service = Service(models, settings, background, request_log, keys, clock=clock)
    metrics.accounts = partial(service.accounts.listed, keys)
    app.delivery = service.delivery
    service.ignored, service.malformed_calls = metrics.ignored, metrics.malformed_calls
    database = StateDatabase(settings.state_dir)
    app.batching = (
        None if settings.no_batches else Batching(service, app, settings.state_dir, database)
    )
    if app.batching is not None:
        metrics.batches = app.batching.health
    responses = Responses(service, database)
    if background is not None:
        closes = (database.close, responses.store.close)
        background.start_soon(_run_state, app.batching, models.finished, closes)
    edge = HttpEdge(service, metrics)
    dialects = (
        OpenAi(service),
        Reranking(service),
        ModelOperations(service),
        RequestOperations(service),
        AdapterOperations(service),
        responses,
        Anthropic(service),
    )
    app.before_request(edge.let_in)
    app.after_request(edge.sign)
    app.register_error_handler(HTTPException, edge.http_error)
    app.register_error_handler(RequestFailed, edge.failed)
    app.register_error_handler(Exception, edge.crashed)
    site = Site(service)
    batching = () if app.batching is None else app.batching.groups
    groups = (*dialects, *batching, Reports(service, metrics, app.batching), site)
    described = [endpoint for group in groups for endpoint in endpoints_of(group)]
    for endpoint in _make_pages(service, described).endpoints:
        app.add_url_rule(endpoint.path, endpoint.name, endpoint.handler, methods=[endpoint.method])
    app.add_url_rule(f"{ASSETS}<digest>/<name>", "site_file", site.file, methods=["GET"])
    return app


def _make_pages(service: Service, described: Sequence[Endpoint]) -> Pages:
    return Pages(
        service.keys,
        described,
        OPENAI | response_schemas.COMPONENTS | ANTHROPIC | BATCHES,
        entries=service.entries,
        has_aliases=lambda: bool(service.aliases.patterns),
        strict=service.settings.strict,
    )


async def _run_state(
    batching: Batching | None, finished: trio.Event, closes: Sequence[Callable[[], Awaitable[None]]]
) -> None:
    """Run batches until the models have drained, and close the database shortly after the last
    responses are stored."""
    try:
        if batching is not None:
            await batching.run()
        await finished.wait()
        await trio.sleep(LAST_RESPONSES_S)
    finally:
        for close in closes:
            await close()


def _configured(app: App, settings: ServerSettings) -> App:
    app.config["MAX_CONTENT_LENGTH"] = settings.body_limit(images=True)
    app.config["BODY_TIMEOUT"] = settings.body_timeout_s
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["STRICT"] = settings.strict
    app.url_map.converters["response"] = ResponseId
    return app


class HttpEdge:
    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service, self._metrics = service, metrics
        self._keys = service.keys
        self._key_file = KeyFile(service.keys)
        self._cors = Cors(service.settings)

    async def let_in(self) -> Response | None:
        CURRENT_REQUEST.set(self._service.request_id)
        await self._key_file.look(trio.current_time())
        # Found before the body is awaited: the file of keys may change meanwhile.
        key = self._service.key
        await self._service.begin_turn(waits=request.path not in HEALTH_PATHS)
        if self._service.batch_owner is not None:
            problem = KEY_REMOVED if key is None else self._missing_right(key)
            return None if problem is None else self._refused(problem)
        head = head_of(request, self._service.headers)
        problem = self._cors.problem(head)
        if problem is not None and (problem.status != 415 or request.url_rule is not None):
            # Where nothing is, no type of a body would be right: that is a 404.
            return self._refused(problem)
        if (preflight := self._cors.preflight(head, self._service.headers)) is not None:
            return preflight
        problem = self._key_problem()
        return None if problem is None else self._refused(problem)

    def _key_problem(self) -> Problem | None:
        path = request.path if request.url_rule is None else request.url_rule.rule
        if access_of(path, restricted=self._keys.restricted) == "open":
            return None
        headers = self._service.headers
        problem = self._keys.problem(headers.get("authorization"), headers.get("x-api-key"))
        if problem is not None:
            return problem
        key = self._service.key
        return None if key is None else self._missing_right(key)

    def _missing_right(self, key: ApiKey) -> Problem | None:
        if request.url_rule is None:
            return None
        path = request.url_rule.rule
        if (problem := missing_right(path, key)) is not None:
            return problem
        closed = access_of(path) == "admin" and not self._service.has_right("admin")
        return admin_without_key(path) if closed else None

    def _refused(self, problem: Problem) -> Response:
        self._service.scope.refusal = problem
        if is_anthropic(request.path):
            body = anthropic_error(problem, self._service.request_id)
            return error_response(attrs.evolve(problem, status=anthropic_status(problem)), body)
        return error_response(
            problem, {"error": problem.message} if is_ollama(request.path) else None
        )

    def _held(self, response: Response) -> Response:
        body = response.response
        if isinstance(body, DataBody) and len(body.data) > LARGE_RESPONSE:
            try:
                self._service.hold(len(body.data))
            except RequestFailed as failed:
                return self._refused(failed.problem)
        return response

    async def sign(self, response: Response) -> Response:
        self._service.end_turn()
        response = self._held(response)
        path = request.url_rule.rule if request.url_rule is not None else ""
        if self._service.batch_owner is None:
            self._metrics.responded(request.method if path else "", path, response.status_code)
            self._service.count_refusal()
        if not self._service.scope.submitted:
            refusal = self._service.scope.refusal
            code = "" if refusal is None else refusal.code or ""
            key = self._service.key_label
            log_response(request.method, request.path, response.status_code, key, code)
        response.headers["X-Request-Id"] = self._service.request_id
        if names := self._service.ignored_names():
            response.headers[HEADER] = names
        if is_anthropic(request.path):
            response.headers["Request-Id"] = self._service.request_id
        for name, value in self._service.limit_headers():
            response.headers[name] = value
        if self._service.models.draining:
            response.headers["Connection"] = "close"
        self._cors.sign(self._service.headers, response)
        return response

    async def http_error(self, error: HTTPException) -> Response:
        if isinstance(error, RequestEntityTooLarge):
            return self._refused(too_large(self._service.body_limit))
        if isinstance(error, RequestTimeout):
            return self._refused(
                http_problem(
                    408, "the body did not arrive in time (--body-timeout-s)", "body_timeout"
                )
            )
        status = error.code or 500
        allowed = dict(error.get_headers()).get("Allow", "")
        message = {
            404: not_found(request.path, request.host_url),
            405: f"{shortened(request.method)} is not for {shortened(request.path)}, which takes "
            f"{allowed}",
        }.get(status, error.description or error.name)
        response = self._refused(http_problem(status, message))
        if status == 405:
            response.headers["Allow"] = allowed
        return response

    async def failed(self, error: RequestFailed) -> Response:
        return self._refused(self._service.read_past.as_sent(error.problem))

    async def crashed(self, error: Exception) -> Response:
        if is_shortage(error):
            log.warning("a request was refused: %s", error)
            return self._refused(SYSTEM_SHORTAGE)
        log.error("a request failed; the others go on", exc_info=error)
        return self._refused(INTERNAL)


class Reports:
    def __init__(self, service: Service, metrics: Metrics, batching: Batching | None) -> None:
        self._service, self._keys = service, service.keys
        self._metrics, self._batching = metrics, batching

    @REPORT(
        path="/health",
        operation="getHealth",
        summary="What every actor knows",
        answer=HEALTH,
    )
    async def health(self) -> Response:
        batches = {} if self._batching is None else {"batches": self._batching.health()}
        body = (
            health_body(self._service.models.entries(), draining=self._service.models.draining)
            | batches
        )
        detailed = not self._keys.restricted or self._service.has_right("observability")
        if self._keys.stale:
            body["api_key_file"] = self._keys.stale
        return as_json(body if detailed else {"status": body["status"]})

    @REPORT(
        path="/livez",
        operation="getLiveness",
        summary="Whether the process answers",
        answer=STATUS,
    )
    async def livez(self) -> Response:
        return as_json({"status": "alive"})

    @REPORT(
        path="/api/hello",
        operation="getHello",
        summary="The same, where Anthropic's clients look",
        answer=STATUS,
    )
    async def hello(self) -> Response:
        return await self.livez()

    @REPORT(
        path="/readyz",
        operation="getReadiness",
        summary="Whether requests are served now",
        answer=READY,
        error=READY,
        also=(503,),
    )
    async def readyz(self) -> Response:
        """Ready if every loaded model makes progress, except models that are being unloaded."""
        listed = self._service.models.entries()
        entries = [entry for entry in listed if entry.state != "unloading"]
        loaded = [entry.runtime.health() for entry in entries if entry.runtime is not None]
        health = next(
            (health for health in loaded if not health.ready), loaded[0] if loaded else None
        )
        if health is None:
            draining = self._service.models.draining
            body = none_loaded(draining=draining, unloading=len(entries) < len(listed))
            return as_json(body, 503 if draining else 200)
        return as_json(
            {"status": health.status, "detail": health.detail}, 200 if health.ready else 503
        )

    @REPORT(
        path="/server_info",
        operation="getServerInfo",
        summary="What a router wants to know",
        description="The default model, and how many requests decode together once it is loaded.",
        answer=INFO,
    )
    async def server_info(self) -> Response:
        return as_json(info_body(self._service.listed(None)))

    @REPORT(
        path="/version",
        operation="getVersion",
        summary="The server's version",
        description="As vLLM's servers tell theirs.",
        answer=full({"version": TEXT}),
    )
    async def version(self) -> Response:
        return as_json({"version": VERSION})

    @REPORT(
        path="/v1/usage",
        operation="getUsage",
        summary="What this key has used since the server started",
        description="Requests and tokens, by model; of all keys, for a key with the right "
        "`observability`.",
        answer=USAGE,
    )
    async def usage(self) -> Response:
        key, accounts = self._service.key or ANYBODY, self._metrics.accounts()
        if "observability" not in key.rights:
            accounts = [account for account in accounts if account.key.identity == key.identity]
        return as_json(usage_body(accounts))

    @REPORT(
        path="/metrics",
        operation="getMetrics",
        summary="Metrics for Prometheus",
        description="In Prometheus' text format; docs/metrics.md says what each of them is.",
        answer={"type": "string"},
        content_type="text/plain",
    )
    async def metrics(self) -> Response:
        data = await self._metrics.exposed()
        return Response(data, content_type=CONTENT_TYPE_PLAIN_0_0_4)
