"""Streams whose text another task writes straight to the socket: the same bytes, whatever a client,
an engine or an error does."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from math import inf
from threading import get_ident
from typing import Any

import attrs
import h11
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.fakes import EOS, ByteTokenizer, FakeEngine
from tests.web.serving import (
    PATIENCE_S,
    Served,
    a_stream_that_goes_on,
    ask,
    eventually,
    exchange,
    get,
    pace,
    post,
    receive_all,
    serving,
)
from tests.web.streams import joined as put_together
from trouper import ServerSettings
from trouper.actors.runtime.answer import Answer, TimeLimits
from trouper.actors.runtime.submission import Submission, open_submission
from trouper.protocol.plans import Plan
from trouper.protocol.problems import Problem
from trouper.protocol.replies import (
    Accepted,
    Delta,
    Finished,
    Scored,
    Started,
    TokenLogprobs,
    joined,
    parts_of,
)
from trouper.protocol.requests import Generate, TextPrompt, Timeouts
from trouper.protocol.settings import Settings
from trouper.web.app import create_app
from trouper.web.http.socket_writer import SocketWriter
from trouper.web.openai.completion_dialect import CompletionDialect
from trouper.web.server import serve_app
from trouper.web.streaming import response_streams
from trouper.web.streaming.response_streams import LONG_SCORES, EventStream
from trouper.web.streaming.step_delivery import (
    MAX_EVENTS,
    STREAMS_AT_ONCE,
    DirectStream,
    StepDelivery,
)

Json = dict[str, Any]
STREAM: Json = {"prompt": "hello", "max_tokens": 60, "stream": True, "ignore_eos": True}
HUGE = 2**23
"""More than the buffers of two sockets hold."""


# -- what is on the wire -------------------------------------------------------------------------


@attrs.frozen
class Written:
    """A chunk that was given to `write_now`, and what the socket did not take of it."""

    chunk: bytes
    rest: bytes


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[Written]:
    """The direct writes of all streams, in order."""
    real, seen = SocketWriter.write_now, list[Written]()

    def watched(self: SocketWriter, chunk: bytes) -> bytes:
        rest = real(self, chunk)
        seen.append(Written(chunk, rest))
        return rest

    monkeypatch.setattr(SocketWriter, "write_now", watched)
    return seen


def read_by_h11(raw: bytes) -> tuple[bytes, bool]:
    """The body of a response, and whether its end came. Raises `h11.RemoteProtocolError` for what
    is no HTTP."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(raw)
    body = b""
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            return body, False
        body += event.data if isinstance(event, h11.Data) else b""
    assert client.trailing_data[0] == b"", "something came behind the end"
    return body, True


def chunks_of(body: bytes) -> list[Json]:
    return [json.loads(event) for event in re.findall(rb"data: (\{.*\})", body)]


def text_of(body: bytes) -> str:
    return "".join(
        choice["text"] for chunk in chunks_of(body) for choice in chunk.get("choices", ())
    )


def named(name: str) -> str:
    """A header that gives a request its id, which is in each of its chunks."""
    return f"X-Request-Id: {name}\r\nConnection: close\r\n"


async def streamed(served: Served, name: str = "usual", **body: Any) -> bytes:
    """The body of a whole stream whose client always reads."""
    async with await served.connect() as client:
        await client.send_all(post("/v1/completions", STREAM | body, named(name)))
        read, ended = read_by_h11(await receive_all(client))
    assert ended and b"data: [DONE]" in read
    return read


async def test_a_head_beside_another_stream_waits_for_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine is in the other's step, and takes longer."""
    waits, real = list[str](), Answer.wait_next

    async def noted(answer: Answer) -> None:
        waits.append(answer.request_id)
        await real(answer)

    monkeypatch.setattr(Answer, "wait_next", noted)
    monkeypatch.setattr(response_streams, "HEAD_WAIT_S", inf)
    async with serving(FakeEngine(before_step=pace)) as served, await served.connect() as other:
        await other.send_all(
            post(
                "/v1/completions", STREAM | {"max_tokens": 100, "ignore_eos": True}, named("other")
            )
        )
        assert (await other.receive_some()).startswith(b"HTTP/1.1 200")
        assert b"data: [DONE]" in await streamed(served, "late", max_tokens=2)
    assert waits == ["other"]


class Wide(ByteTokenizer):
    """Each token is much text, so that few of them fill the buffers of a connection."""

    longest_token = WIDTH = 1024

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) * self.WIDTH if token < EOS else b""


MUCH: Json = {"max_tokens": 800, "return_token_ids": True, "logprobs": 1}


@asynccontextmanager
async def client_that_stops(
    served: Served, direct: list[Written], **body: Any
) -> AsyncIterator[trio.SocketStream]:
    """A client whose socket is full, in the middle of a chunk: it has not read anything yet."""
    with trio.socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await client.connect(("127.0.0.1", served.port))
        stream = trio.SocketStream(client)
        await stream.send_all(post("/v1/completions", STREAM | MUCH | body, named("slow")))
        await eventually(lambda: is_stopped(direct))
        yield stream


def is_stopped(direct: list[Written]) -> bool:
    return any(one.rest and b"cmpl-slow" in one.chunk for one in direct)


@attrs.define
class Gate:
    """Holds the engine still while it is shut."""

    _open: trio.Event = attrs.field(factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self._open.set()

    async def before(self, plan: Plan) -> None:
        await pace(plan)
        await self._open.wait()

    @contextmanager
    def shut(self) -> Iterator[None]:
        self._open = trio.Event()
        try:
            yield
        finally:
            self._open.set()


# -- the writer ----------------------------------------------------------------------------------


@attrs.frozen
class Wire:
    """A writer, the other end of its connection, and how often the connection was cut."""

    writer: SocketWriter
    peer: socket.socket
    cuts: list[None]

    def received(self) -> bytes:
        """What has arrived by now."""
        data = b""
        try:
            while more := self.peer.recv(2**20):
                data += more
        except BlockingIOError:
            pass
        return data


@asynccontextmanager
async def wire(timeout_s: float = 60.0) -> AsyncIterator[Wire]:
    ours, peer = socket.socketpair()
    with ours, peer:
        ours.setblocking(False)
        peer.setblocking(False)
        cuts: list[None] = []
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        yield Wire(SocketWriter(stream, timeout_s, lambda: cuts.append(None)), peer, cuts)


@pytest.mark.parametrize("size", [1, 9, 10, 15, 16, 255, 256, 4095, 4096, 65_535, 65_536, 70_000])
async def test_a_chunk_is_the_one_that_h11_makes(size: int) -> None:
    chunk = bytes(place % 251 for place in range(size))
    server = h11.Connection(h11.SERVER)
    server.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    server.next_event()
    server.send(h11.Response(status_code=200, headers=[]))
    async with wire() as one:
        assert one.writer.write_now(chunk) == b""
        assert one.received() == server.send(h11.Data(data=chunk))


async def test_what_a_socket_does_not_take_is_returned() -> None:
    chunk = b"0123456789" * (HUGE // 10)
    async with wire() as one:
        rest = one.writer.write_now(chunk)
        assert 0 < len(rest) < len(chunk)
        behind = one.writer.write_now(b"behind it")
        assert behind == b"9\r\nbehind it\r\n", "a full socket takes nothing"
        assert one.received() + rest == b"%x\r\n%b\r\n" % (len(chunk), chunk)
        assert one.cuts == []


async def test_a_client_that_left_takes_nothing_and_the_next_write_finds_it() -> None:
    async with wire() as one:
        one.peer.close()
        assert one.writer.write_now(b"x") == b"1\r\nx\r\n"
        await one.writer.write(b"1\r\nx\r\n")
        assert len(one.cuts) == 1


async def test_nothing_comes_between_the_parts_of_another_write() -> None:
    """Also if there is room at that moment."""
    data = b"x" * HUGE
    async with wire() as one, trio.open_nursery() as nursery:
        nursery.start_soon(one.writer.write, data)
        await wait_all_tasks_blocked()
        received = one.received()
        assert one.writer.write_now(b"between") == b"7\r\nbetween\r\n"
        while len(received) < len(data):
            await wait_all_tasks_blocked()
            received += one.received()
        assert received == data


async def test_a_write_that_is_cancelled_cuts_the_connection() -> None:
    async with wire() as one:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.writer.write, b"x" * HUGE)
                await wait_all_tasks_blocked()
                assert one.cuts == []
                scope.cancel()
        assert len(one.cuts) == 1


async def test_a_write_that_nobody_reads_cuts_the_connection(autojump_clock: MockClock) -> None:
    async with wire(timeout_s=7) as one:
        await one.writer.write(b"x" * HUGE)
        assert trio.current_time() == pytest.approx(7)
        assert one.cuts


# -- the task that writes for all ----------------------------------------------------------------


class Plain:
    """A dialect in which everything is as it is called, and which remembers the threads that
    formatted text."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.deltas: list[Delta] = []

    def body(self, _choices: object) -> Json:
        raise AssertionError("it is a stream")

    def opening(self, _index: int, _answer: Answer) -> bytes:
        return b"(opening)"

    def text(self, _index: int, delta: Delta, _answer: Answer) -> bytes:
        self.threads.append(get_ident())
        self.deltas.append(delta)
        if delta.text == "wrong":
            raise ValueError("this text cannot be formatted")
        return delta.text.encode()

    def ending(self, _index: int, _finished: Finished, _answer: Answer) -> bytes:
        return b"(ending)"

    def closing(self, _usages: object) -> bytes:
        return b"(closing)"

    def failure(self, problem: Problem) -> bytes:
        return f"({problem.code})".encode()

    def heartbeat(self, _index: int, _answer: Answer) -> bytes:
        return b"(heartbeat)"


HEARTBEAT_S = 10.0


@attrs.frozen
class Flow:
    """A stream between a scheduler, which is the test, and a client, which is too."""

    wire: Wire
    submission: Submission
    answer: Answer
    dialect: Plain
    delivery: StepDelivery
    given: list[bytes]
    """What was given to the layers between, for them to write."""

    async def reply(self, *texts: str) -> None:
        """Send deltas in one step."""
        for text in texts:
            self.submission.reply(Delta(text, tuple(text.encode())))
        await wait_all_tasks_blocked()

    def received(self) -> bytes:
        """The text that was written directly."""
        chunks, data = [], self.wire.received()
        while data:
            size, _, data = data.partition(b"\r\n")
            chunks.append(data[: int(size, 16)])
            assert data[int(size, 16) :][:2] == b"\r\n"
            data = data[int(size, 16) + 2 :]
        return b"|".join(chunks)


def direct_stream(
    one: Wire, answer: Answer, dialect: Plain, delivery: StepDelivery
) -> DirectStream:
    return DirectStream(
        answer, dialect.text, writer=one.writer, delivery=delivery, heartbeat_s=HEARTBEAT_S
    )


def asked(timeouts: Timeouts | None = None) -> tuple[Submission, Answer]:
    request = Generate(request_id="r", prompt=TextPrompt("x"), max_tokens=2000)
    submission, received = open_submission(request, Settings())
    limits = TimeLimits(timeouts or Timeouts(), trio.current_time())
    return submission, Answer(
        "r", Accepted((1,), 2000), received, limits, arrivals=submission.arrivals
    )


@asynccontextmanager
async def flowing(timeouts: Timeouts | None = None) -> AsyncIterator[Flow]:
    """The stream has begun, and the text "first" was given to the layers between."""
    submission, answer = asked(timeouts)
    dialect, delivery = Plain(), StepDelivery()
    with answer:
        async with wire() as one, trio.open_nursery() as nursery:
            flow = Flow(one, submission, answer, dialect, delivery, [])
            nursery.start_soon(delivery.run)
            body = EventStream(dialect, [answer], HEARTBEAT_S, nursery, (one.writer, delivery))

            async def respond() -> None:
                async for data in body:
                    flow.given.append(data)

            nursery.start_soon(respond)
            submission.reply(Started(0))
            await flow.reply("first")
            assert flow.given == [b"(opening)", b"first"]
            flow.given.clear()
            yield flow
            nursery.cancel_scope.cancel()
    submission.close()


async def test_text_is_written_directly_and_the_end_by_the_layers_between(
    mock_clock: MockClock,
) -> None:
    async with flowing() as flow:
        await flow.reply("a")
        await flow.reply("b")
        assert (flow.received(), flow.given) == (b"a|b", [])
        flow.submission.reply(Delta("c", (1,)))
        flow.submission.end(Finished("stop", 4))
        await wait_all_tasks_blocked()
        assert (flow.received(), flow.given) == (b"c", [b"(ending)(closing)"])


async def test_what_waits_together_is_one_chunk_up_to_a_limit(mock_clock: MockClock) -> None:
    async with flowing() as flow:
        await flow.reply(*"abc")
        assert flow.received() == b"abc"
        await flow.reply(*("x" * (2 * MAX_EVENTS + 3)))
        assert [len(chunk) for chunk in flow.received().split(b"|")] == [MAX_EVENTS, MAX_EVENTS, 3]


async def test_replies_pass_the_channel_while_they_are_followed(mock_clock: MockClock) -> None:
    """To go through it costs a token of a stream more than all else until it is written. The end
    follows the text all the same."""
    async with flowing() as flow:
        await flow.reply("a")
        flow.submission.reply(Delta("b", (1,)))
        flow.submission.reply(Delta("c", (1,)))
        assert flow.submission.replies.statistics().current_buffer_used == 0
        await wait_all_tasks_blocked()
        assert flow.received() == b"a|bc"
        flow.submission.reply(Delta("d", (1,)))
        flow.submission.end(Finished("stop", 5))
        await wait_all_tasks_blocked()
        assert (flow.received(), flow.given) == (b"d", [b"(ending)(closing)"])


@pytest.mark.parametrize("first", ["close", "follow"])
async def test_a_closed_answer_is_not_followed(first: str, mock_clock: MockClock) -> None:
    """What is replied would reach nobody, and the scheduler would take it for read, in each
    step."""
    submission, answer = asked()
    if first == "close":
        answer.close()
    answer.follow(lambda: None)
    answer.close()
    assert not submission.reply(Delta("x", (1,)))
    assert submission.aborted
    assert not answer._unread
    submission.close()


def test_joined_deltas_have_everything_and_each_of_them() -> None:
    deltas = [
        Delta(
            text,
            tuple(text.encode()),
            tuple(TokenLogprobs(token, -1.0) for token in text.encode()),
            at,
        )
        for at, text in enumerate(("a", "", "bc"))
    ]
    one = joined(deltas)
    assert (one.text, one.tokens, one.at) == ("abc", tuple(b"abc"), 2)
    assert [seen.token for seen in one.logprobs] == [*b"abc"]
    assert [*parts_of(one)] == deltas
    assert joined(deltas[:1]) is deltas[0]
    assert [*parts_of(deltas[0])] == deltas[:1]


async def test_held_text_is_no_empty_chunk(mock_clock: MockClock) -> None:
    """An empty chunk is the end of a body."""
    async with flowing() as flow:
        await flow.reply("", "")
        await flow.reply("a")
        assert flow.received() == b"a"


async def test_a_heartbeat_is_due_so_long_after_the_last_write(mock_clock: MockClock) -> None:
    async with flowing() as flow:
        for _ in range(3):
            mock_clock.jump(0.8 * HEARTBEAT_S)
            await wait_all_tasks_blocked()
            assert flow.given == []
            await flow.reply("a")
        await flow.reply("")
        mock_clock.jump(0.8 * HEARTBEAT_S)
        await flow.reply("")
        assert flow.given == []
        mock_clock.jump(0.3 * HEARTBEAT_S)
        await wait_all_tasks_blocked()
        assert flow.given == [b"(heartbeat)"], "held text is no sign of life"
        mock_clock.jump(1.1 * HEARTBEAT_S)
        await wait_all_tasks_blocked()
        await flow.reply("b")
        assert (flow.received(), flow.given) == (b"a|a|a|b", [b"(heartbeat)"] * 2)


async def test_the_limit_between_tokens_counts_from_the_last_one(mock_clock: MockClock) -> None:
    """Also where a heartbeat is due long after it, or often before it."""
    for limit in (0.5 * HEARTBEAT_S, 2.5 * HEARTBEAT_S):
        async with flowing(Timeouts(between_tokens_s=limit)) as flow:
            for _ in range(3):
                mock_clock.jump(0.8 * limit)
                await flow.reply("")
                assert {*flow.given} <= {b"(heartbeat)"}
            mock_clock.jump(0.8 * limit)
            await wait_all_tasks_blocked()
            assert {*flow.given} <= {b"(heartbeat)"}
            mock_clock.jump(0.3 * limit)
            await wait_all_tasks_blocked()
            await wait_all_tasks_blocked()
            assert flow.given[-1] == b"(token_timeout)"


async def test_a_cancelled_answer_ends_the_stream_although_nothing_arrives(
    mock_clock: MockClock,
) -> None:
    async with flowing() as flow:
        await flow.reply("a")
        flow.answer.cancel()
        await wait_all_tasks_blocked()
        assert (flow.received(), flow.given) == (b"a", [b"(cancelled)"])


async def test_long_scores_of_a_prompt_are_formatted_beside_the_event_loop(
    mock_clock: MockClock,
) -> None:
    """The first text carries them, whatever was written between them and it."""
    submission, answer = asked()
    dialect, delivery = Plain(), StepDelivery()
    async with wire() as one, trio.open_nursery() as nursery:
        nursery.start_soon(delivery.run)
        body = EventStream(dialect, [answer], HEARTBEAT_S, nursery, (one.writer, delivery))
        assert await anext(body) == b"(opening)"
        submission.reply(Started(0))
        submission.reply(Scored((TokenLogprobs(1, -1.0),) * (LONG_SCORES + 1)))
        nursery.start_soon(wait_and_jump, mock_clock)
        assert await anext(body) == b"(heartbeat)"
        for text in "abc":
            submission.reply(Delta(text, (1,)))
        submission.end(Finished("stop", 3))
        assert await anext(body) + await anext(body) == b"abc(ending)(closing)"
        assert (one.received(), len(dialect.threads)) == (b"", 3)
        assert dialect.threads[0] != get_ident(), "the first text"
        nursery.cancel_scope.cancel()


async def wait_and_jump(clock: MockClock) -> None:
    await wait_all_tasks_blocked()
    clock.jump(1.1 * HEARTBEAT_S)


async def test_a_stream_that_is_cancelled_in_the_middle_of_a_chunk_is_cut(
    mock_clock: MockClock,
) -> None:
    """A part of the chunk is on the wire, so that nothing may come behind it: neither the rest,
    which is lost, nor anything else."""
    submission, answer = asked()
    delivery = StepDelivery()
    async with wire() as one:
        stream = direct_stream(one, answer, Plain(), delivery)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.run)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()  # It hears so after this step's text was written.
            submission.reply(Delta("x" * HUGE, (1,)))
            stream.deliver(trio.current_time())
        assert one.cuts
        submission.reply(Delta("y", (1,)))
        stream.deliver(trio.current_time())
        received = one.received()
        assert 0 < len(received) < HUGE
        assert b"y" not in received
    submission.close()
    answer.close()


async def test_a_stream_that_is_cancelled_between_chunks_is_not_cut(mock_clock: MockClock) -> None:
    """It is written to no more: what comes next on the connection is another's."""
    submission, answer = asked()
    async with wire() as one:
        stream = direct_stream(one, answer, Plain(), StepDelivery())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.run)
            await wait_all_tasks_blocked()
            submission.reply(Delta("x", (1,)))
            stream.deliver(trio.current_time())
            submission.reply(Delta("y", (1,)))
            nursery.cancel_scope.cancel()
        stream.deliver(trio.current_time())
        assert (one.received(), one.cuts) == (b"1\r\nx\r\n", [])
    submission.close()
    answer.close()


async def test_an_error_is_raised_in_the_stream_itself(mock_clock: MockClock) -> None:
    """The task that writes goes on with the other streams of the step."""
    delivery = StepDelivery()
    submissions, answers = zip(*(asked() for _ in range(3)), strict=True)
    failures: list[ValueError] = []
    async with wire() as one, trio.open_nursery() as nursery:
        nursery.start_soon(delivery.run)

        async def respond(stream: DirectStream) -> None:
            try:
                await stream.run()
            except ValueError as error:
                failures.append(error)

        for answer in answers:
            nursery.start_soon(respond, direct_stream(one, answer, Plain(), delivery))
        await wait_all_tasks_blocked()
        for submission, text in zip(submissions, ("a", "wrong", "b"), strict=True):
            submission.reply(Delta(text, (1,)))
        await wait_all_tasks_blocked()
        for submission in submissions:
            submission.reply(Delta("c", (1,)))
        await wait_all_tasks_blocked()
        assert one.received() == b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n1\r\nc\r\n"
        assert [str(error) for error in failures] == ["this text cannot be formatted"]
        assert one.cuts == []
        nursery.cancel_scope.cancel()
    for submission, answer in zip(submissions, answers, strict=True):
        submission.close()
        answer.close()


async def test_other_tasks_run_between_the_streams_of_a_large_step() -> None:
    delivery = StepDelivery()
    ran: list[str] = []

    class Counted(DirectStream):
        def deliver(self, now: float) -> None:
            ran.append("stream")

    async def other() -> None:
        while True:
            ran.append("other")
            await trio.lowlevel.checkpoint()

    submission, answer = asked()
    async with wire() as one, trio.open_nursery() as nursery:
        nursery.start_soon(delivery.run)
        await wait_all_tasks_blocked()
        for _ in range(3 * STREAMS_AT_ONCE):
            delivery.note(
                Counted(answer, Plain().text, writer=one.writer, delivery=delivery, heartbeat_s=1)
            )
        nursery.start_soon(other)
        with trio.fail_after(PATIENCE_S):
            while ran.count("stream") < 3 * STREAMS_AT_ONCE:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    runs = [len(run) for run in "".join("s" if name == "stream" else " " for name in ran).split()]
    assert sum(runs) == 3 * STREAMS_AT_ONCE
    assert max(runs) <= 2 * STREAMS_AT_ONCE, (
        "the other task runs once in each round, before or after"
    )
    submission.close()
    answer.close()


# -- through real sockets ------------------------------------------------------------------------


async def test_a_stream_is_http_and_another_request_may_follow(direct: list[Written]) -> None:
    async with serving() as served, await served.connect() as client:
        usual = text_of(await streamed(served))
        direct.clear()
        for _ in range(2):
            await client.send_all(post("/v1/completions", STREAM))
            with trio.fail_after(PATIENCE_S):
                raw = await client.receive_some()
                while not read_by_h11(raw)[1]:
                    raw += await client.receive_some()
            assert text_of(read_by_h11(raw)[0]) == usual
        await client.send_all(get("/livez"))
        assert b'"alive"' in await receive_all(client)
    assert len(direct) > 2
    assert all(not one.rest and text_of(one.chunk) in usual for one in direct)


@pytest.mark.long
async def test_a_client_that_stops_reading_gets_everything_later(direct: list[Written]) -> None:
    """While it does not read, the others' streams go on."""
    async with serving(FakeEngine(before_step=pace, tokenizer=Wide())) as served:
        usual = put_together(chunks_of(await streamed(served, **MUCH)))
        async with client_that_stops(served, direct) as client:
            async with a_stream_that_goes_on(served):
                pass
            received, ended = read_by_h11(await receive_all(client))
    assert ended and received.endswith(b"data: [DONE]\n\n")
    assert put_together(chunks_of(received)) == usual
    assert len(usual[0]["text"]) == Wide.WIDTH * MUCH["max_tokens"]


async def test_a_client_that_never_reads_is_cut_off_although_nothing_else_happens(
    direct: list[Written],
) -> None:
    gate = Gate()
    engine = FakeEngine(before_step=gate.before, tokenizer=Wide())
    async with (
        serving(engine, write_timeout_s=0.3, heartbeat_s=3600) as served,
        client_that_stops(served, direct),
    ):
        with gate.shut():
            await eventually(lambda: served.connections == 0)
        await eventually(lambda: served.busy == 0)


@pytest.mark.parametrize("held", [False, True])
async def test_a_cancelled_stream_says_so(direct: list[Written], held: bool) -> None:
    """Also while its engine is held still, so that no reply wakes it."""
    gate = Gate()
    async with (
        serving(FakeEngine(before_step=gate.before), heartbeat_s=3600) as served,
        await served.connect() as client,
    ):
        await client.send_all(post("/v1/completions", STREAM | {"max_tokens": 4000}, named("mine")))
        await eventually(lambda: len(direct) > 5)
        if held:
            with gate.shut():
                status, _ = await ask(served, b"", "/v1/requests/mine/cancel")
                body, ended = read_by_h11(await receive_all(client))
        else:
            status, _ = await ask(served, b"", "/v1/requests/mine/cancel")
            body, ended = read_by_h11(await receive_all(client))
        await eventually(lambda: served.busy == 0)
    assert (status, ended) == (200, True)
    [*text, last] = chunks_of(body)
    assert last["error"]["code"] == "cancelled" and b"[DONE]" not in body
    assert 0 < len(text) < 4000 and all("choices" in chunk for chunk in text)


async def test_an_error_in_a_dialect_ends_that_stream_alone(
    direct: list[Written], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = CompletionDialect.text

    def text(self: CompletionDialect, index: int, delta: Delta, answer: Answer) -> bytes:
        if self.envelope.id == "cmpl-broken" and answer.completion_tokens > 20:
            raise ValueError("this dialect is broken")
        return real(self, index, delta, answer)

    bodies: dict[str, tuple[bytes, bool]] = {}

    async def listen(name: str) -> None:
        async with await served.connect() as client:
            await client.send_all(post("/v1/completions", STREAM, named(name)))
            bodies[name] = read_by_h11(await receive_all(client))

    async with serving() as served:
        usual = text_of(await streamed(served))
        monkeypatch.setattr(CompletionDialect, "text", text)
        async with a_stream_that_goes_on(served), trio.open_nursery() as nursery:
            for name in ("one", "broken", "other"):
                nursery.start_soon(listen, name)
        await eventually(lambda: served.busy == 0)
    for name in ("one", "other"):
        assert (text_of(bodies[name][0]), bodies[name][1]) == (usual, True)
    body, ended = bodies["broken"]
    text_before, _, last = body.rpartition(b"data: ")
    assert ended and usual.startswith(text_of(text_before)) and 1 <= len(text_of(text_before)) <= 20
    assert json.loads(last)["error"]["code"] == "internal_error"
    assert "this dialect is broken" in caplog.text
    assert any(b"cmpl-broken" in one.chunk for one in direct)


async def test_older_http_is_never_written_directly(direct: list[Written]) -> None:
    """HTTP/1.0 has no chunks."""
    async with serving() as served:
        usual = text_of(await streamed(served))
        direct.clear()
        old = post("/v1/completions", STREAM).replace(b"HTTP/1.1", b"HTTP/1.0")
        async with await served.connect() as client:
            await client.send_all(old)
            head, _, body = (await receive_all(client)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body.endswith(b"data: [DONE]\n\n") and body.startswith((b"data: ", b": "))
    assert (text_of(body), direct) == (usual, [])


async def test_several_answers_are_never_written_directly(direct: list[Written]) -> None:
    """Their events are in one order, which the response's own task makes."""
    async with serving() as served:
        choices = put_together(chunks_of(await streamed(served, n=2)))
    assert [len(choice["text"]) for choice in choices] == [STREAM["max_tokens"]] * 2
    assert direct == []


@asynccontextmanager
async def within_another_app(served: Served) -> AsyncIterator[Served]:
    """Our app within a program's, which changes the body of each response."""
    settings, shutdown = ServerSettings(port=0), trio.Event()
    async with trio.open_nursery() as nursery:
        app = create_app(served.runtime, settings, nursery)

        async def around(scope: Any, receive: Any, send: Any) -> None:
            async def swapped(message: Any) -> None:
                if message["type"] == "http.response.body":
                    message = message | {"body": message["body"].swapcase()}
                await send(message)

            await app(scope, receive, swapped)

        serve = partial(serve_app, around, settings, shutdown=shutdown)
        async with trio.open_nursery() as outer:
            [url] = await outer.start(serve)
            yield attrs.evolve(served, port=int(url.rsplit(":", 1)[1]))
            shutdown.set()
        nursery.cancel_scope.cancel()


async def test_a_program_of_its_own_sees_all_that_is_sent(direct: list[Written]) -> None:
    async with serving() as served:
        usual = text_of(await streamed(served))
        direct.clear()
        async with within_another_app(served) as other:
            _, _, raw = await exchange(other, post("/v1/completions", STREAM))
    assert b"DATA: [done]" in raw
    assert direct == []
    assert text_of(raw.swapcase()) == usual


async def test_tokens_of_a_step_are_one_event(direct: list[Written]) -> None:
    body = STREAM | {"return_token_ids": True, "logprobs": 2, "max_tokens": 100}
    engine = FakeEngine(before_step=pace, guess=lambda *_: (4, 4))
    async with serving(engine, {"speculation": "ngram"}) as served:
        _, complete = await ask(served, body | {"stream": False})
        chunks = chunks_of(await streamed(served, **body))
    [streamed_choice] = put_together(chunks)
    [complete_choice] = complete["choices"]
    for name in ("text", "token_ids", "logprobs"):
        assert streamed_choice[name] == complete_choice[name]
    together = [
        choice
        for chunk in chunks
        for choice in chunk["choices"]
        if len(choice.get("token_ids", ())) > 1
    ]
    assert together, "each token was an event"
    for choice in together:
        assert len(choice["token_ids"]) == len(choice["text"]) == len(choice["logprobs"]["tokens"])
    assert len(direct) < 100


async def test_nothing_follows_a_part_of_a_chunk(direct: list[Written]) -> None:
    """A client that ends its side has left. What it still reads ends where the socket was full."""
    async with (
        serving(FakeEngine(before_step=pace, tokenizer=Wide())) as served,
        a_stream_that_goes_on(served),
    ):
        usual = text_of(await streamed(served, **MUCH))
        async with client_that_stops(served, direct) as client:
            await client.send_eof()
            await eventually(lambda: served.busy == 1)
            body, ended = read_by_h11(await receive_all(client))
        assert not ended and usual.startswith(text_of(body))
        assert b"error" not in body and len(text_of(body)) < len(usual)


async def test_heartbeats_come_while_the_engine_is_held(direct: list[Written]) -> None:
    gate = Gate()
    async with serving(FakeEngine(before_step=gate.before), heartbeat_s=0.05) as served:
        usual = text_of(await streamed(served))
        async with await served.connect() as client:
            await client.send_all(post("/v1/completions", STREAM, named("mine")))
            await eventually(lambda: any(b"cmpl-mine" in one.chunk for one in direct))
            raw = b""
            with gate.shut(), trio.fail_after(PATIENCE_S):
                while not raw.endswith(b": keep-alive\n\n\r\n" + b"e\r\n: keep-alive\n\n\r\n" * 2):
                    raw += await client.receive_some()
            body, ended = read_by_h11(raw + await receive_all(client))
    assert (text_of(body), ended) == (usual, True)


async def test_the_limit_between_tokens_holds_from_the_first_one_on(direct: list[Written]) -> None:
    """Also if the stream's task began to sleep before it, when the limit of the first token was the
    next."""
    gate = Gate()
    engine, texts = FakeEngine(before_step=gate.before), list[bytes]()
    async with serving(engine, {"token_timeout_s": 0.3}, heartbeat_s=3600) as served:
        async with await served.connect() as client:
            with gate.shut():
                await client.send_all(
                    post("/v1/completions", STREAM | {"max_tokens": 4000}, named("mine"))
                )
                with trio.fail_after(PATIENCE_S):
                    # The head, which does not wait for long.
                    texts.append(await client.receive_some())
            await eventually(lambda: len(direct) > 0)
            with gate.shut():
                body, ended = read_by_h11(b"".join(texts) + await receive_all(client))
        await eventually(lambda: served.busy == 0)
    assert ended and chunks_of(body)[-1]["error"]["code"] == "token_timeout"


async def test_the_limit_between_tokens_ends_a_stream(direct: list[Written]) -> None:
    gate = Gate()
    engine = FakeEngine(before_step=gate.before)
    async with serving(engine, {"token_timeout_s": 0.3}, heartbeat_s=3600) as served:
        async with await served.connect() as client:
            await client.send_all(
                post("/v1/completions", STREAM | {"max_tokens": 4000}, named("mine"))
            )
            await eventually(lambda: len(direct) > 2)
            with gate.shut():
                body, ended = read_by_h11(await receive_all(client))
        await eventually(lambda: served.busy == 0)
    assert ended and chunks_of(body)[-1]["error"]["code"] == "token_timeout"
