"""OpenTelemetry spans, made when a request has ended. Needs the extra `otel`.

An embedding program passes `Traces(tracer).observe` as an observer to `serve_http` or `create_app`.
"""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trouper.protocol.record import RequestRecord

Attributes = dict[str, str | int | float | tuple[str, ...]]
OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
"""Operation names of endpoints that are no chat."""


class Traces:
    """Creates a span for each request, and one inside for each phase: queue, prefill, decode."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def observe(self, record: RequestRecord) -> None:
        span = self._tracer.start_span(
            f"POST {record.endpoint}",
            context=self._caller(record),
            kind=SpanKind.SERVER,
            start_time=_ns(record, record.arrived_at),
            attributes=_attributes(record),
        )
        if span.is_recording():
            self._phases(record, set_span_in_context(span, Context()))
            _tell_end(record, span)
        span.end(_ns(record, record.ended_at))

    def _caller(self, record: RequestRecord) -> Context:
        """Return the client's trace context; empty if none was sent, or an invalid one."""
        carrier = {"traceparent": record.traceparent, "tracestate": record.tracestate}
        return self._propagator.extract(
            {name: value for name, value in carrier.items() if value}, Context()
        )

    def _phases(self, record: RequestRecord, inside: Context) -> None:
        first, last = record.first_token_at, record.last_token_at
        if record.reason != "refused":
            self._phase(
                record, "queue", record.arrived_at, record.admitted_at or record.ended_at, inside
            )
        if record.admitted_at is not None:
            prefill = self._start(record, "prefill", record.admitted_at, inside)
            prefill.add_event("cache", _tiers(record), _ns(record, record.admitted_at))
            prefill.end(_ns(record, record.ended_at if first is None else first))
        if first is not None and last is not None:
            self._phase(record, "decode", first, last, inside)

    def _phase(
        self, record: RequestRecord, name: str, begin: float, end: float, inside: Context
    ) -> None:
        self._start(record, name, begin, inside).end(_ns(record, end))

    def _start(self, record: RequestRecord, name: str, begin: float, inside: Context) -> Span:
        return self._tracer.start_span(name, context=inside, start_time=_ns(record, begin))


def _attributes(record: RequestRecord) -> Attributes:
    """Return attributes, with OpenTelemetry's names where defined. A refused request has no
    counts."""
    attributes: Attributes = {
        "http.request.method": "POST",
        "http.route": record.endpoint,
        "gen_ai.operation.name": OPERATIONS.get(record.endpoint, "chat"),
        "gen_ai.request.model": record.model,
        "trouper.request_id": record.request_id,
    }
    if record.reason == "refused":
        return attributes
    return attributes | {
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.generated_tokens,
        "gen_ai.response.finish_reasons": (record.reason,),
    }


def _tiers(record: RequestRecord) -> Attributes:
    """Return the number of prompt tokens by source; the remaining ones are computed."""
    return {
        "trouper.cached_tokens": record.cached_tokens,
        "trouper.disk_tokens": record.disk_tokens,
        "trouper.computed_tokens": record.prompt_tokens - record.cached_tokens,
    }


def _tell_end(record: RequestRecord, span: Span) -> None:
    if record.code:
        span.set_attribute("error.type", record.code)
    if record.reason == "error":
        span.set_status(Status(StatusCode.ERROR, record.code))


def _ns(record: RequestRecord, at: float) -> int:
    return int((at + record.unix_offset) * 1e9)
