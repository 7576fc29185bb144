"""A request as spans, as a strict collector reads them: one for HTTP, inside it one of the model's
operation, inside that its phases or choices."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any

import attrs
import pytest
import trio

from tests.fakes import FakeEngine, Ranking
from tests.otlp import Collector, Kind, Span, StatusCode, collecting
from tests.web.batching import ended, request, started, strict
from tests.web.serving import (
    PATIENCE_S,
    STREAM,
    Served,
    ask,
    eventually,
    exchange,
    get,
    post,
    serving,
)
from trouper.cli.trace_export import tracing
from trouper.protocol.record import RequestRecord
from trouper.web.observability.exchange import Exchange, ExchangeObserver

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True}


@attrs.frozen
class Traced:
    """Spans arrive when it has ended."""

    observers: tuple[ExchangeObserver, ...]
    collector: Collector
    closing: ExitStack

    @property
    def traces(self) -> list[list[Span]]:
        self.closing.close()
        return self.collector.traces

    @property
    def only(self) -> list[Span]:
        [spans] = self.traces
        return spans

    @property
    def named(self) -> dict[str, Span]:
        spans = self.only
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}


@pytest.fixture
def traced() -> Iterator[Traced]:
    with collecting() as collector, ExitStack() as closing:
        yield Traced(closing.enter_context(tracing(collector.url)), collector, closing)


@asynccontextmanager
async def served_traced(
    traced: Traced, engine: FakeEngine | None = None, **more: Any
) -> AsyncIterator[Served]:
    async with serving(engine, exchange_observers=traced.observers, **more) as served:
        yield served


async def test_a_request_is_a_span_of_http_with_the_operation_and_its_phases_inside(
    traced: Traced,
) -> None:
    headers = "X-Request-Id: mine-1\r\nUser-Agent: test/1\r\n"
    async with served_traced(traced) as served:
        status, answer = await ask(served, BODY | {"temperature": 0.5, "seed": 7}, headers=headers)
        assert status == 200
    names = ("POST /v1/completions", "text_completion fake", "queue", "prefill", "decode")
    server, operation, *inside = (traced.named[name] for name in names)
    assert len(traced.only) == 5
    assert (server.kind, server.parent_id) == (Kind.SPAN_KIND_SERVER, "")
    assert server.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "server.address": "localhost",
        "server.port": 80,
        "network.protocol.version": "1.1",
        "user_agent.original": "test/1",
        "trouper.request_id": "mine-1",
    }
    assert (operation.kind, operation.parent_id) == (Kind.SPAN_KIND_INTERNAL, server.span_id)
    assert operation.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "trouper",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stream": False,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 4,
    }
    assert {span.parent_id for span in inside} == {operation.span_id}
    times = [
        server.start,
        operation.start,
        *(time for span in inside for time in (span.start, span.end)),
        operation.end,
        server.end,
    ]
    assert all(before <= after for before, after in pairwise(times)), "one after the other"
    assert {span.status for span in traced.only} == {StatusCode.STATUS_CODE_UNSET}


OPERATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (CHAT, "chat"),
    "/v1/messages": ({"max_tokens": 4, "messages": CHAT["messages"]}, "chat"),
    "/v1/responses": ({"input": "hello", "max_output_tokens": 4}, "chat"),
    "/v1/completions": (BODY, "text_completion"),
    "/infill": ({"input_prefix": "a", "input_suffix": "b", "n_predict": 4}, "text_completion"),
    "/v1/embeddings": ({"input": ["a", "b"]}, "embeddings"),
    "/v1/rerank": ({"query": "a", "documents": ["b", "c"]}, "rerank"),
    "/v1/score": ({"text_1": "a", "text_2": ["b", "c"]}, "rerank"),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", OPERATIONS)
async def test_each_endpoint_has_its_operation(traced: Traced, path: str, streamed: bool) -> None:
    body, name = OPERATIONS[path]
    generates = name in ("chat", "text_completion")
    if streamed and not generates:
        return
    async with served_traced(traced, FakeEngine(tokenizer=Ranking())) as served:
        more = {"stream": True} if streamed else {}
        status, _, answer = await exchange(served, post(path, body | more))
        assert status == 200, answer
    operation = traced.named[f"{name} fake"]
    attributes = operation.attributes
    assert attributes["gen_ai.operation.name"] == name
    assert attributes["gen_ai.usage.input_tokens"] > 0
    assert ("gen_ai.usage.output_tokens" in attributes) == generates
    assert ("gen_ai.response.time_to_first_chunk" in attributes) == streamed
    assert attributes.get("gen_ai.request.stream") == (streamed if generates else None)
    if "gen_ai.response.id" in attributes:
        assert json.dumps(attributes["gen_ai.response.id"]).encode() in answer


async def test_choices_are_one_operation_and_a_prompt_counts_once(traced: Traced) -> None:
    async with served_traced(traced) as served:
        status, answer = await ask(served, CHAT | {"n": 4}, "/v1/chat/completions")
        assert status == 200
    [operation] = [span for span in traced.only if span.name == "chat fake"]
    usage = answer["usage"]
    assert operation.attributes["gen_ai.request.choice.count"] == 4
    assert operation.attributes["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert operation.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert operation.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 16
    choices = [span for span in traced.only if span.parent_id == operation.span_id]
    assert [span.attributes["trouper.choice.index"] for span in choices] == [0, 1, 2, 3]
    assert {span.name for span in choices} == {"choice"}
    assert sum(span.name == "decode" for span in traced.only) == 4


async def test_prompts_of_one_request_are_added(traced: Traced) -> None:
    async with served_traced(traced) as served:
        status, answer = await ask(served, BODY | {"prompt": ["a", "bcd"], "n": 2})
        assert status == 200
    [operation] = [span for span in traced.only if span.name == "text_completion fake"]
    assert operation.attributes["gen_ai.request.choice.count"] == 2
    assert operation.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert len(operation.attributes["gen_ai.response.finish_reasons"]) == 4


async def test_a_rerank_of_a_hundred_is_one_operation(traced: Traced) -> None:
    async with served_traced(traced, FakeEngine(tokenizer=Ranking())) as served:
        body = {"query": "a", "documents": [f"document {number}" for number in range(100)]}
        status, answer = await ask(served, body, "/v1/rerank")
        assert status == 200
    server, operation = traced.only
    assert (server.name, operation.name) == ("POST /v1/rerank", "rerank fake")
    assert operation.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["total_tokens"]


async def test_each_line_of_a_batch_is_a_trace(traced: Traced) -> None:
    async with served_traced(traced) as served:
        client = strict(served.base_url)
        batch = await trio.to_thread.run_sync(
            lambda: ended(client, started(client, [request(name) for name in "abc"]))
        )
        assert batch.status == "completed"
    servers = [spans[0] for spans in traced.traces]
    lines = [span for span in servers if span.name == "POST /v1/chat/completions"]
    assert len(lines) == 3
    assert all("server.address" not in span.attributes for span in lines)
    assert "POST /v1/batches" in {span.name for span in servers}


async def test_work_in_the_background_outlasts_the_span_of_http(traced: Traced) -> None:
    body = {"input": "hello", "max_output_tokens": 4, "background": True}
    async with served_traced(traced) as served:
        _, answer = await ask(served, body, "/v1/responses")
        path = f"/v1/responses/{answer['id']}"
        with trio.fail_after(PATIENCE_S):
            while (await ask_for(served, path))["status"] in ("queued", "in_progress"):
                pass
    first = traced.traces[0]
    operation = next(span for span in first if span.name == "chat fake")
    assert operation.attributes["gen_ai.usage.output_tokens"] == 4
    assert operation.attributes["gen_ai.response.id"] == answer["id"]
    assert first[0].end < operation.end
    assert traced.collector.servers[1].attributes["http.route"] == "/v1/responses/{response_id}"
    assert traced.collector.servers[1].attributes["url.path"] == path


async def ask_for(served: Served, path: str) -> Any:
    return json.loads((await exchange(served, get(path)))[2])


async def test_tiers_are_an_event_of_prefill(traced: Traced) -> None:
    async with served_traced(traced) as served:
        await ask(served, BODY)
        await ask(served, BODY)
    _, spans = traced.traces
    [prefill] = [span for span in spans if span.name == "prefill"]
    assert prefill.events == {
        "cache": {
            "trouper.cached_tokens": 4,
            "trouper.disk_tokens": 0,
            "trouper.computed_tokens": 1,
        }
    }
    [operation] = [span for span in spans if span.name == "text_completion fake"]
    assert operation.attributes["gen_ai.usage.cache_read.input_tokens"] == 4


@pytest.mark.parametrize(
    ("headers", "trace"),
    [
        (f"traceparent: 00-{TRACE}-{CALLER}-01\r\ntracestate: a=b\r\n", TRACE),
        ("traceparent: nonsense\r\n", None),
        (f"traceparent: 00-{'0' * 32}-{CALLER}-01\r\n", None),
    ],
)
async def test_it_is_part_of_the_callers_trace(
    traced: Traced, headers: str, trace: str | None
) -> None:
    async with served_traced(traced) as served:
        await ask(served, BODY, headers=headers)
    server = traced.only[0]
    if trace is None:
        assert server.parent_id == ""
    else:
        assert (server.trace_id, server.parent_id) == (TRACE, CALLER)
        assert server.trace_state == "a=b"


async def test_a_long_state_is_lost_and_the_trace_is_not(traced: Traced) -> None:
    async with served_traced(traced) as served:
        long = "a=" + "b" * 2000
        await ask(
            served, BODY, headers=f"traceparent: 00-{TRACE}-{CALLER}-01\r\ntracestate: {long}\r\n"
        )
    assert (traced.only[0].trace_id, traced.only[0].trace_state) == (TRACE, "")


async def test_a_caller_that_is_not_sampled_costs_no_spans(traced: Traced) -> None:
    async with served_traced(traced) as served:
        await ask(served, BODY, headers=f"traceparent: 00-{TRACE}-{CALLER}-00\r\n")
    assert not traced.traces


async def test_who_left_has_the_phases_that_were_reached(traced: Traced) -> None:
    left: list[Exchange] = []
    async with serving(exchange_observers=[*traced.observers, left.append]) as served:
        async with await served.connect() as stream:
            await stream.send_all(post("/v1/completions", STREAM))
            with trio.fail_after(PATIENCE_S):
                while b"data: " not in await stream.receive_some():
                    pass
        await eventually(lambda: bool(left))
    spans = traced.named
    assert set(spans) == {
        "POST /v1/completions",
        "text_completion fake",
        "queue",
        "prefill",
        "decode",
    }
    operation = spans["text_completion fake"]
    assert operation.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    for span in (operation, spans["POST /v1/completions"]):
        assert span.attributes["error.type"] == "client_disconnected"
        assert span.status == StatusCode.STATUS_CODE_ERROR


REFUSED: dict[int, tuple[Callable[[Served], bytes], str]] = {
    400: (lambda _: post("/v1/completions", {"prompt": 1}, KEY), "POST /v1/completions"),
    401: (lambda _: post("/v1/completions", BODY), "POST /v1/completions"),
    404: (lambda _: post("/nothing/here", BODY, KEY), "POST"),
    405: (lambda _: b"BREW / HTTP/1.1\r\nHost: [::1]:8000\r\nConnection: close\r\n\r\n", "HTTP"),
    413: (lambda _: post("/v1/completions", b"x" * 2000, KEY), "POST /v1/completions"),
}
KEY = "Authorization: Bearer k\r\n"


@pytest.mark.parametrize("status", REFUSED)
async def test_what_is_refused_before_it_reaches_a_model_has_its_span(
    traced: Traced, status: int
) -> None:
    made, name = REFUSED[status]
    async with served_traced(traced, api_key=("k",), max_body_bytes=1024) as served:
        assert (await exchange(served, made(served)))[0] == status
    [server] = traced.only
    assert server.name == name
    assert server.attributes["http.response.status_code"] == status
    assert (server.status, "error.type" in server.attributes) == (
        StatusCode.STATUS_CODE_UNSET,
        False,
    )
    if status == 405:
        assert server.attributes["http.request.method"] == "_OTHER"
        assert server.attributes["http.request.method_original"] == "BREW"
        assert server.attributes["server.address"] == "::1"
        assert server.attributes["server.port"] == 8000


async def test_what_the_model_refuses_is_an_error_of_its_operation_alone(traced: Traced) -> None:
    async with served_traced(traced) as served:
        assert (await ask(served, {"prompt": "x" * 5000}))[0] == 400
    server, operation = traced.only
    assert (server.status, operation.status) == (
        StatusCode.STATUS_CODE_UNSET,
        StatusCode.STATUS_CODE_ERROR,
    )
    assert operation.attributes["error.type"] == "context_length_exceeded"
    assert not [name for name in operation.attributes if name.startswith("gen_ai.usage")]


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_failed_is_an_error(traced: Traced, streamed: bool) -> None:
    async with served_traced(traced, settings={"request_timeout_s": 0.5}) as served:
        status, *_ = await exchange(served, post("/v1/completions", STREAM | {"stream": streamed}))
    server, operation = (
        traced.named[name] for name in ("POST /v1/completions", "text_completion fake")
    )
    assert {server.status, operation.status} == {StatusCode.STATUS_CODE_ERROR}
    assert operation.attributes["error.type"] == "request_timeout"
    assert (status, server.attributes["error.type"]) == (
        (200, "request_timeout") if streamed else (504, "504")
    )


async def test_probes_have_none_and_other_requests_have(traced: Traced) -> None:
    async with served_traced(traced) as served:
        for path in ("/health", "/livez", "/readyz", "/metrics", "/v1/models/fake?x=1"):
            assert (await exchange(served, get(path)))[0] == 200
    [server] = traced.only
    assert server.name == "GET /v1/models/{model}"
    assert server.attributes["url.path"] == "/v1/models/fake"


async def test_an_observer_that_fails_costs_nobody_anything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reasons: list[str] = []

    def fail(_: RequestRecord | Exchange) -> None:
        raise OSError("no")

    observers = [fail, lambda record: reasons.append(record.reason)]
    async with serving(observers=observers, exchange_observers=[fail]) as served:
        for _ in range(2):
            assert (await ask(served, BODY))[0] == 200
    assert reasons == ["length"] * 2
    assert "could not be told" in caplog.text
    assert "could not be traced" in caplog.text
