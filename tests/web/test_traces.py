"""A request as spans: queue, prefill and decode inside of it, in the caller's trace if there is
one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import attrs
import pytest
import trio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.web.serving import PATIENCE_S, STREAM, ask, eventually, post, serving
from trouper.protocol.record import RequestRecord
from trouper.web.observability.request_spans import Traces

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True}


@attrs.frozen
class Spans:
    exporter: InMemorySpanExporter
    traces: Traces

    @property
    def finished(self) -> Mapping[str, ReadableSpan]:
        spans = self.exporter.get_finished_spans()
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}


@pytest.fixture
def spans() -> Spans:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(exporter, Traces(provider.get_tracer("tests")))


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


async def test_a_request_is_a_span_with_its_phases_inside(spans: Spans) -> None:
    async with serving(observers=[spans.traces.observe]) as served:
        status, _ = await ask(served, BODY, headers="X-Request-Id: mine-1\r\n")
        assert status == 200
    whole, *inside = (
        spans.finished[name] for name in ("POST /v1/completions", "queue", "prefill", "decode")
    )
    assert len(spans.finished) == 4
    assert whole.kind is SpanKind.SERVER
    assert whole.parent is None
    assert attributes(whole) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
        "trouper.request_id": "mine-1",
    }
    for span in inside:
        assert span.parent is not None
        assert whole.context is not None
        assert span.parent.span_id == whole.context.span_id
    times = [
        whole.start_time,
        *(time for span in inside for time in (span.start_time, span.end_time)),
        whole.end_time,
    ]
    assert all((before or 0) <= (after or 0) for before, after in pairwise(times)), (
        "one after the other"
    )
    assert whole.status.status_code is StatusCode.UNSET


async def test_tiers_are_an_event_of_prefill(spans: Spans) -> None:
    async with serving(observers=[spans.traces.observe]) as served:
        await ask(served, BODY)
        spans.exporter.clear()
        await ask(served, BODY)
    [event] = spans.finished["prefill"].events
    assert event.name == "cache"
    assert dict(event.attributes or {}) == {
        "trouper.cached_tokens": 4,
        "trouper.disk_tokens": 0,
        "trouper.computed_tokens": 1,
    }


@pytest.mark.parametrize(
    ("headers", "trace"),
    [
        (f"traceparent: 00-{TRACE}-{CALLER}-01\r\ntracestate: a=b\r\n", TRACE),
        ("traceparent: nonsense\r\n", None),
        (f"traceparent: 00-{'0' * 32}-{CALLER}-01\r\n", None),
    ],
)
async def test_it_is_part_of_the_callers_trace(
    spans: Spans, headers: str, trace: str | None
) -> None:
    async with serving(observers=[spans.traces.observe]) as served:
        await ask(served, BODY, headers=headers)
    whole = spans.finished["POST /v1/completions"]
    assert whole.context is not None
    assert {span.context.trace_id for span in spans.finished.values() if span.context} == {
        whole.context.trace_id
    }
    if trace is None:
        assert whole.parent is None
    else:
        assert whole.parent is not None
        assert (f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}") == (TRACE, CALLER)
        assert whole.context.trace_state.get("a") == "b"


async def test_a_long_state_is_lost_and_the_trace_is_not(spans: Spans) -> None:
    """The request log keeps its records, and nobody may fill them."""
    kept: list[RequestRecord] = []
    async with serving(observers=[spans.traces.observe, kept.append]) as served:
        long = "a=" + "b" * 2000
        await ask(
            served, BODY, headers=f"traceparent: 00-{TRACE}-{CALLER}-01\r\ntracestate: {long}\r\n"
        )
    whole = spans.finished["POST /v1/completions"]
    assert whole.context is not None
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert [record.tracestate for record in kept] == [""]


async def test_a_caller_that_is_not_sampled_costs_no_spans(spans: Spans) -> None:
    async with serving(observers=[spans.traces.observe]) as served:
        await ask(served, BODY, headers=f"traceparent: 00-{TRACE}-{CALLER}-00\r\n")
    assert not spans.finished


async def test_who_left_has_the_phases_that_were_reached(spans: Spans) -> None:
    async with serving(observers=[spans.traces.observe]) as served:
        async with await served.connect() as stream:
            await stream.send_all(post("/v1/completions", STREAM))
            with trio.fail_after(PATIENCE_S):
                while b"data: " not in await stream.receive_some():
                    pass
        await eventually(lambda: "POST /v1/completions" in spans.finished)
    assert set(spans.finished) == {"POST /v1/completions", "queue", "prefill", "decode"}
    assert attributes(spans.finished["POST /v1/completions"])["gen_ai.response.finish_reasons"] == (
        "abort",
    )


async def test_what_failed_is_an_error_and_what_was_refused_is_none(spans: Spans) -> None:
    async with serving(observers=[spans.traces.observe]) as served:
        await ask(served, {"prompt": "x" * 5000})
    refused = spans.finished["POST /v1/completions"]
    assert set(spans.finished) == {"POST /v1/completions"}
    assert not [name for name in attributes(refused) if name.startswith("gen_ai.usage")]
    assert (refused.status.status_code, attributes(refused)["error.type"]) == (
        StatusCode.UNSET,
        "context_length_exceeded",
    )
    spans.exporter.clear()
    async with serving(
        settings={"request_timeout_s": 0.5}, observers=[spans.traces.observe]
    ) as served:
        await ask(served, STREAM | {"stream": False})
    failed = spans.finished["POST /v1/completions"]
    assert (failed.status.status_code, failed.status.description) == (
        StatusCode.ERROR,
        "request_timeout",
    )


async def test_a_reader_that_fails_costs_nobody_anything(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def fail(_: RequestRecord) -> None:
        raise OSError("no")

    async with serving(observers=[fail, lambda record: told.append(record.reason)]) as served:
        for _ in range(2):
            assert (await ask(served, BODY))[0] == 200
    assert told == ["length"] * 2
    assert "could not be told" in caplog.text
