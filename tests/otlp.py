"""A collector that takes traces as OTLP over HTTP, and refuses what the protocol or the published
semantic conventions do not know."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from typing import Any

import attrs
from google.protobuf.message import (  # type: ignore[import-untyped]
    DecodeError,
    Message,
)
from google.protobuf.unknown_fields import (  # type: ignore[import-untyped]
    UnknownFieldSet,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, http_attributes
from opentelemetry.semconv.attributes import (
    error_attributes,
    network_attributes,
    server_attributes,
    url_attributes,
    user_agent_attributes,
)

from tests.http_threads import served_in_thread

Kind, StatusCode = trace_pb2.Span.SpanKind, trace_pb2.Status.StatusCode
CONVENTIONS = (
    error_attributes,
    gen_ai_attributes,
    http_attributes,
    network_attributes,
    server_attributes,
    url_attributes,
    user_agent_attributes,
)
CONVENTIONAL = {
    value for module in CONVENTIONS for value in vars(module).values() if isinstance(value, str)
}
OWN = "trouper."


@attrs.frozen
class Span:
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    start: int
    end: int
    status: int
    attributes: Mapping[str, Any]
    events: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, span: trace_pb2.Span) -> Span:
        assert len(span.trace_id) == 16 and any(span.trace_id)
        assert len(span.span_id) == 8 and any(span.span_id)
        assert len(span.parent_span_id) in (0, 8)
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
        return cls(
            span.name,
            span.kind,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.trace_state,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            span.status.code,
            attributes_of(span.attributes),
            {event.name: attributes_of(event.attributes) for event in span.events},
        )


def attributes_of(pairs: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for pair in pairs:
        assert isinstance(pair, KeyValue)
        assert pair.key not in attributes, f"{pair.key} is there twice"
        assert pair.key in CONVENTIONAL or pair.key.startswith(OWN), (
            f"no convention knows {pair.key}"
        )
        attributes[pair.key] = value_of(pair.value)
    return attributes


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)


def check_fields(message: Message) -> None:
    assert not len(UnknownFieldSet(message)), message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if field.is_repeated else [value]:
                check_fields(one)


class Collector(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taking)
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        self.faults: list[Exception] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def resource(self) -> Mapping[str, Any]:
        pairs = self.requests[0][1].resource_spans[0].resource.attributes
        return {pair.key: value_of(pair.value) for pair in pairs}

    @property
    def spans(self) -> list[Span]:
        """By their begin."""
        assert not self.faults
        spans = [
            Span.of(span)
            for _, request in self.requests
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        assert len({span.span_id for span in spans}) == len(spans)
        return sorted(spans, key=lambda span: (span.trace_id, span.start, span.parent_id != ""))

    @property
    def traces(self) -> list[list[Span]]:
        """By their begin; each has one server span, and all its other spans are inside of it."""
        groups = [[*group] for _, group in groupby(self.spans, lambda span: span.trace_id)]
        for spans in groups:
            ids = {span.span_id for span in spans}
            outer = [span for span in spans if span.parent_id not in ids]
            assert [span.kind for span in outer] == [Kind.SPAN_KIND_SERVER], outer
            assert sum(span.kind == Kind.SPAN_KIND_SERVER for span in spans) == 1
        return sorted(groups, key=lambda spans: spans[0].start)

    @property
    def servers(self) -> list[Span]:
        return [
            span for spans in self.traces for span in spans if span.kind == Kind.SPAN_KIND_SERVER
        ]


class Taking(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, Collector)
        try:
            assert self.headers["Content-Type"] == "application/x-protobuf"
            if self.headers["Content-Encoding"] == "gzip":
                data = gzip.decompress(data)
            request = ExportTraceServiceRequest.FromString(data)
            check_fields(request)
            self.server.requests.append((self.path, request))
        except (AssertionError, DecodeError, OSError) as error:
            self.server.faults.append(error)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with served_in_thread(Collector()) as collector:
        yield collector
