"""OpenTelemetry spans, made when a request has ended. Needs the extra `otel`.

Names and attributes are those of the semantic conventions for HTTP servers and for generative AI.
An embedding program passes `Traces(tracer).observe` as an observer of exchanges to `serve_http` or
`create_app`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from urllib.parse import urlsplit

import attrs
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trouper.protocol.hosts import PORTS
from trouper.protocol.record import RequestRecord
from trouper.web.observability.exchange import Exchange

Attributes = dict[str, str | bool | int | float | tuple[str, ...]]
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")
GENERATING = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/infill": "text_completion",
}

# `gen_ai.operation.name` by route. The conventions name no operation for reranking.
OPERATIONS = GENERATING | {
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/score": "rerank",
}
MAX_CHOICES = 16  # Choices with spans of their own; more are in the operation's counts alone.
DISCONNECTED = "client_disconnected"


class Traces:
    """Creates a server span for each request, inside it one for the model's operation, and inside
    that one the phases of each choice: queue, prefill, decode."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def observe(self, exchange: Exchange) -> None:
        http = _http_attributes(exchange)
        method = "HTTP" if http["http.request.method"] == "_OTHER" else exchange.method
        spans = _Spans(self._tracer, exchange.unix_offset)
        server = spans.start(
            f"{method} {exchange.route}".rstrip(),
            exchange.began_at,
            self._caller(exchange),
            SpanKind.SERVER,
            http,
        )
        if server.is_recording():
            if exchange.records and exchange.route in OPERATIONS:
                _add_operation(spans, exchange, set_span_in_context(server, Context()))
            _fail(server, _server_fault(exchange))
        spans.end(server, exchange.ended_at)

    def _caller(self, exchange: Exchange) -> Context:
        """Return the client's trace context; empty if none was sent, or an invalid one."""
        carrier = {name: exchange.header(name) for name in ("traceparent", "tracestate")}
        return self._propagator.extract(
            {name: value for name, value in carrier.items() if value}, Context()
        )


@attrs.frozen
class _Spans:
    tracer: Tracer
    unix_offset: float

    def start(
        self,
        name: str,
        at: float,
        context: Context,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
    ) -> Span:
        return self.tracer.start_span(
            name, context=context, kind=kind, start_time=self._ns(at), attributes=attributes
        )

    def end(self, span: Span, at: float) -> None:
        span.end(self._ns(at))

    def add_phases(self, record: RequestRecord, inside: Context) -> None:
        first, last = record.first_token_at, record.last_token_at
        if record.reason != "refused":
            queue = self.start("queue", record.arrived_at, inside)
            self._add_waits(queue, record, record.arrived_at, record.admitted_at)
            self.end(queue, record.admitted_at or record.ended_at)
        if record.admitted_at is not None:
            prefill = self.start("prefill", record.admitted_at, inside)
            prefill.add_event("cache", _tiers(record), self._ns(record.admitted_at))
            self._add_waits(prefill, record, record.admitted_at, first)
            self.end(prefill, record.ended_at if first is None else first)
        if first is not None and last is not None:
            decode = self.start("decode", first, inside)
            self._add_waits(decode, record, first, None)
            self.end(decode, last)

    def _add_waits(
        self, span: Span, record: RequestRecord, begin: float, end: float | None
    ) -> None:
        """Add an event for each wait that began in a phase. `end` None: the record's end."""
        for one in record.transitions:
            if one.reason and begin <= one.at < (inf if end is None else end):
                attributes: Attributes = {
                    "trouper.state": one.state,
                    "trouper.wait.reason": one.reason,
                    "trouper.wait.for": one.waits_for,
                }
                span.add_event("wait", attributes, self._ns(one.at))

    def _ns(self, at: float) -> int:
        return int((at + self.unix_offset) * 1e9)


def _add_operation(spans: _Spans, exchange: Exchange, inside: Context) -> None:
    prompts = exchange.by_prompt()
    records = [record for choices in prompts for record in choices]
    name = OPERATIONS[exchange.route]
    requested = exchange.model or records[0].model
    span = spans.start(
        f"{name} {requested}",
        min(record.arrived_at for record in records),
        inside,
        attributes={
            "gen_ai.operation.name": name,
            "gen_ai.provider.name": "trouper",
            "gen_ai.request.model": requested,
            **_request_attributes(exchange, len(prompts[0])),
        },
    )
    span.set_attributes(_response_attributes(exchange, prompts))
    _fail(span, next(filter(None, map(_fault, records)), ""))
    within = set_span_in_context(span, Context())
    if len(records) == 1:
        spans.add_phases(records[0], within)
    elif name in GENERATING.values() and len(records) <= MAX_CHOICES:
        for index, record in enumerate(records):
            _add_choice(spans, index, record, within)
    spans.end(span, max(record.ended_at for record in records))


def _add_choice(spans: _Spans, index: int, record: RequestRecord, inside: Context) -> None:
    span = spans.start(
        "choice",
        record.arrived_at,
        inside,
        attributes={
            "trouper.choice.index": index,
            "trouper.choice.finish_reason": record.reason,
            "trouper.choice.output_tokens": record.generated_tokens,
        },
    )
    _fail(span, _fault(record))
    spans.add_phases(record, set_span_in_context(span, Context()))
    spans.end(span, record.ended_at)


def _http_attributes(exchange: Exchange) -> Attributes:
    is_listed = exchange.method in METHODS
    attributes: Attributes = {
        "http.request.method": exchange.method if is_listed else "_OTHER",
        "url.path": exchange.path,
        "url.scheme": exchange.scheme,
        "network.protocol.version": exchange.http_version,
        "trouper.request_id": exchange.request_id,
        **_server_attributes(exchange),
    }
    if not is_listed:
        attributes["http.request.method_original"] = exchange.method[:20]
    if exchange.route:
        attributes["http.route"] = exchange.route
    if agent := exchange.header("user-agent"):
        attributes["user_agent.original"] = agent
    if exchange.status is not None:
        attributes["http.response.status_code"] = exchange.status
    return attributes


def _server_attributes(exchange: Exchange) -> Attributes:
    """Return the address and port that the client named, else those of the socket. A line of a
    batch has neither."""
    try:
        url = urlsplit(f"//{exchange.header('host')}")
        name, port = url.hostname, url.port or PORTS.get(exchange.scheme)
    except ValueError:
        name = port = None
    attributes: Attributes = {}
    if not name and exchange.socket is not None:
        name, port = exchange.socket
    if name:
        attributes["server.address"] = name
        if port is not None:
            attributes["server.port"] = port
    return attributes


def _server_fault(exchange: Exchange) -> str:
    """Return the class of a fault of the server or the connection. A status of 4xx is none."""
    if exchange.status is not None and exchange.status >= 500:
        return str(exchange.status)
    if not exchange.is_complete:
        return DISCONNECTED
    if exchange.status != 200:
        return ""
    return next((record.code for record in exchange.records if record.reason == "error"), "")


def _fault(record: RequestRecord) -> str:
    if record.reason in ("error", "refused"):
        return record.code or record.reason
    return (record.code or DISCONNECTED) if record.reason == "abort" else ""


def _fail(span: Span, fault: str) -> None:
    if fault:
        span.set_attribute("error.type", fault)
        span.set_status(Status(StatusCode.ERROR))


def _request_attributes(exchange: Exchange, choices: int) -> Attributes:
    generate = exchange.generate
    if exchange.route not in GENERATING or generate is None:
        return {}
    sampling = generate.sampling
    attributes: Attributes = {
        "gen_ai.request.stream": exchange.streamed,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
    }
    sent: dict[str, tuple[bool, str | int | float | tuple[str, ...]]] = {
        "choice.count": (choices != 1, choices),
        "max_tokens": (generate.names_length, generate.max_tokens or 0),
        "top_k": (sampling.top_k > 0, sampling.top_k),
        "seed": (exchange.seed is not None, exchange.seed or 0),
        "stop_sequences": (bool(generate.stop), generate.stop),
        "frequency_penalty": (bool(sampling.frequency_penalty), sampling.frequency_penalty),
        "presence_penalty": (bool(sampling.presence_penalty), sampling.presence_penalty),
    }
    return attributes | {
        f"gen_ai.request.{name}": value for name, (is_sent, value) in sent.items() if is_sent
    }


def _response_attributes(
    exchange: Exchange, prompts: Sequence[Sequence[RequestRecord]]
) -> Attributes:
    """Return usage, in which a prompt counts once, and ends. A refused request has none."""
    records = [record for choices in prompts for record in choices if record.reason != "refused"]
    if not records:
        return {}
    adapter = f":{records[0].adapter}" if records[0].adapter else ""
    attributes: Attributes = {
        "gen_ai.response.model": records[0].model + adapter,
        "gen_ai.usage.input_tokens": sum(choices[0].prompt_tokens for choices in prompts),
        "gen_ai.usage.cache_read.input_tokens": sum(
            choices[0].cached_tokens for choices in prompts
        ),
    }
    if exchange.response_id:
        attributes["gen_ai.response.id"] = exchange.response_id
    if exchange.route not in GENERATING:
        return attributes
    attributes["gen_ai.usage.output_tokens"] = sum(record.generated_tokens for record in records)
    attributes["gen_ai.response.finish_reasons"] = tuple(record.reason for record in records)
    firsts = [record.first_token_at for record in records if record.first_token_at is not None]
    if exchange.streamed and firsts:
        attributes["gen_ai.response.time_to_first_chunk"] = min(firsts) - exchange.began_at
    return attributes


def _tiers(record: RequestRecord) -> Attributes:
    """Return the number of prompt tokens by source; the remaining ones are computed."""
    return {
        "trouper.cached_tokens": record.cached_tokens,
        "trouper.disk_tokens": record.disk_tokens,
        "trouper.computed_tokens": record.prompt_tokens - record.cached_tokens,
    }
