"""Running answers as responses: collected, or as server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

import attrs
import trio
from quart.wrappers.response import ResponseBody

from trouper.actors.runtime.answer import Answer
from trouper.protocol.problems import INTERNAL, SYSTEM_SHORTAGE, RequestFailed, is_shortage
from trouper.protocol.replies import Delta, Finished
from trouper.web.http.json_response import long_work
from trouper.web.http.socket_writer import SocketWriter
from trouper.web.output.dialect import COMMENT, Choice, Dialect, usage_of
from trouper.web.streaming.step_delivery import MAX_EVENTS, DirectStream, StepDelivery

log = logging.getLogger("trouper.web")
LONG_SCORES = 500
"""Number of log-probabilities beyond which formatting leaves the event loop."""

# Characters of a complete answer beyond which a thread parses, at about 3 us a character.
LONG_ANSWER = 5000


DELTA_BYTES = 300
"""Memory of the text of a token that waits for its client."""
SCORE_BYTES = 500
"""Memory of a log-probability, and of its JSON."""
Hold = Callable[[int], None]
"""Holds so many bytes more for a request. Raises `RequestFailed`."""


def unbounded(amount: int) -> None:
    """Hold bytes that nobody counts."""


async def at_once() -> None:
    """Wait for nothing before the end."""


async def collect(answer: Answer, hold: Hold = unbounded) -> Choice:
    """Collect a complete answer. Raises `RequestFailed`, never returning a partial one (F13)."""
    deltas = list[Delta]()
    async for delta in answer:
        deltas.append(delta)
        hold(DELTA_BYTES)
        if delta.logprobs:
            hold(SCORE_BYTES * sum(1 + len(seen.top_ids) for seen in delta.logprobs))
    assert answer.finished is not None
    return Choice(
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        logprobs=tuple(seen for delta in deltas for seen in delta.logprobs),
        finished=answer.finished,
        usage=usage_of(answer),
        prompt_tokens=answer.accepted.prompt_tokens,
        prompt_logprobs=answer.prompt_logprobs,
        deltas=tuple(deltas),
    )


def is_long(choices: Sequence[Choice]) -> bool:
    """Whether formatting takes more than some milliseconds."""
    scores = sum(len(choice.logprobs) + len(choice.prompt_logprobs) for choice in choices)
    return scores > LONG_SCORES or sum(len(choice.text) for choice in choices) > LONG_ANSWER


async def collect_all(answers: Sequence[Answer], hold: Hold = unbounded) -> list[Choice]:
    """Collect answers concurrently, as `collect`. The first failure ends the others."""
    choices: dict[int, Choice] = {}
    failures: list[RequestFailed] = []

    async def collect_one(index: int, answer: Answer) -> None:
        try:
            choices[index] = await collect(answer, hold)
        except RequestFailed as failed:
            failures.append(failed)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index, answer in enumerate(answers):
            nursery.start_soon(collect_one, index, answer)
    if failures:
        raise failures[0]
    return [choices[index] for index in range(len(answers))]


@attrs.frozen
class AnswerEvent:
    index: int
    event: Delta | Finished | RequestFailed


async def pump(index: int, answer: Answer, pieces: trio.MemorySendChannel[AnswerEvent]) -> None:
    """Forward one of several answers into their common stream."""
    # The stream has no reader any more: the client disconnected, or another answer failed. All
    # answers are closed then.
    with pieces, suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        event: Delta | Finished | RequestFailed | None = None
        while not isinstance(event, Finished | RequestFailed):
            try:
                event = await answer.next()
            except RequestFailed as failed:
                event = failed
            await pieces.send(AnswerEvent(index, event))


async def shielded(make: Callable[[AnswerEvent], bytes], piece: AnswerEvent) -> bytes:
    """Run `make` on a thread, shielded from cancellation: the dialect has changed its state, and
    the result must not be lost."""
    made: list[bytes] = []
    with trio.CancelScope(shield=True):
        made.append(await long_work(partial(make, piece)))
    return made[0]


# Longest wait of a response's head for the first token: the head holds the GIL for 1 ms, just when
# the engine builds the prompt's pass. First token of 53 prompt tokens on an H100: 16 ms in place of
# 20.
HEAD_WAIT_S = 0.005


class EventStream(ResponseBody):
    """The body of a streamed response. Closing it aborts the answers, synchronously."""

    def __init__(
        self,
        dialect: Dialect,
        answers: Sequence[Answer],
        heartbeat_s: float,
        nursery: trio.Nursery,
        direct: tuple[SocketWriter, StepDelivery] | None = None,
        *,
        hold: Hold = unbounded,
        before_end: Callable[[], Awaitable[None]] = at_once,
    ) -> None:
        """`direct`: writes the text of a single answer behind the head. `hold` is called as more
        waits for a slow client. `before_end` is awaited before the last events are sent."""
        self._hold, self._max_waiting, self._before_end = hold, MAX_EVENTS, before_end
        self._dialect, self._answers, self._heartbeat_s = dialect, answers, heartbeat_s
        self._nursery = nursery
        self._delivery = None if direct is None else direct[1]
        self._direct = None if direct is None or len(answers) > 1 else self._direct_stream(*direct)
        self._pieces: trio.MemoryReceiveChannel[AnswerEvent] | None = None
        self._open = set(range(len(answers)))
        self._over = False
        self._began = False
        self._opening = b""
        self._begun: set[int] = set()
        """Indices of answers whose prompt log-probabilities were written."""

    async def waited(self) -> Self:
        """Wait up to `HEAD_WAIT_S` for a single answer, unless other streams run. Returns the
        body."""
        if len(self._answers) == 1 and not (self._delivery and self._delivery.running):
            with trio.move_on_after(HEAD_WAIT_S):
                await self._answers[0].wait_next()
        return self

    async def __aenter__(self) -> AsyncIterator[bytes]:
        if len(self._answers) > 1:
            sending, self._pieces = trio.open_memory_channel[AnswerEvent](0)
            with sending:
                for index, answer in enumerate(self._answers):
                    self._nursery.start_soon(pump, index, answer, sending.clone())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pieces is not None:
            self._pieces.close()
        for answer in self._answers:
            answer.close()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """Return the available events as one write. An error ends the stream with an event: the
        status was sent long ago."""
        if self._over:
            raise StopAsyncIteration
        for answer in self._answers:
            answer.history.release()
        try:
            self._hold_waiting()
            written = await self._next_write()
        except RequestFailed as failed:
            self._over = True
            written = self._opening + self._dialect.failure(failed.problem)
        except Exception as error:
            log.exception("a stream failed; the others go on")
            self._over = True
            problem = SYSTEM_SHORTAGE if is_shortage(error) else INTERNAL
            written = self._opening + self._dialect.failure(problem)
        if self._over:
            await self._before_end()
        for answer in self._answers:
            answer.history.hold("client")  # Until the connection takes the next write.
        return written

    def _hold_waiting(self) -> None:
        waiting = sum(answer.waiting for answer in self._answers)
        if waiting > self._max_waiting:
            more, self._max_waiting = waiting - self._max_waiting, waiting
            self._hold(DELTA_BYTES * more)

    async def _next_write(self) -> bytes:
        """Wait for events and return them as one write: the opening first, a heartbeat after
        silence."""
        if not self._began:
            self._began = True
            self._opening = b"".join(
                self._dialect.opening(index, answer) for index, answer in enumerate(self._answers)
            )
            text = b"" if self._direct is None else await self._what_waits()
            opening, self._opening = self._opening, b""
            # The head of the response goes out with it, however long the prompt takes.
            return opening + text or COMMENT
        if self._direct is not None and not self._takes_long(0) and not await self._direct.run():
            return self._heartbeat()
        written = b""
        with trio.move_on_after(self._heartbeat_s):
            while not written:  # Tokens whose text is held back send nothing.
                written = await self._made(await self._next())
        if not written:
            return self._heartbeat()
        return written + await self._what_waits()

    def _direct_stream(self, writer: SocketWriter, delivery: StepDelivery) -> DirectStream:
        return DirectStream(
            self._answers[0],
            self._dialect.text,
            writer=writer,
            delivery=delivery,
            heartbeat_s=self._heartbeat_s,
        )

    def _heartbeat(self) -> bytes:
        index = min(self._open)
        return self._dialect.heartbeat(index, self._answers[index])

    async def _next(self) -> AnswerEvent:
        if self._pieces is not None:
            return await self._pieces.receive()
        try:
            return AnswerEvent(0, await self._answers[0].next())
        except RequestFailed as failed:
            return AnswerEvent(0, failed)

    async def _made(self, piece: AnswerEvent) -> bytes:
        if not self._takes_long(piece.index):
            return self._written(piece)
        self._begun.add(piece.index)
        return await shielded(self._written, piece)

    def _takes_long(self, index: int) -> bool:
        """Whether the next event has the log-probabilities of a long prompt, which take a
        second."""
        return index not in self._begun and len(self._answers[index].prompt_logprobs) > LONG_SCORES

    def _written(self, piece: AnswerEvent) -> bytes:
        answer = self._answers[piece.index]
        match piece.event:
            case Delta() as delta:
                written = self._dialect.text(piece.index, delta, answer)
                if not written:
                    answer.history.hold("parser" if delta.text else "stop_string")
                return written
            case Finished() as finished:
                self._open.discard(piece.index)
                return self._dialect.ending(piece.index, finished, answer) + self._end()
            case RequestFailed() as failed:
                self._over = True
                return self._dialect.failure(failed.problem)

    async def _what_waits(self) -> bytes:
        events: list[bytes] = []
        while (
            not self._over and len(events) < MAX_EVENTS and (piece := self._waiting()) is not None
        ):
            events.append(await self._made(piece))
        return b"".join(events)

    def _waiting(self) -> AnswerEvent | None:
        if self._pieces is None:
            delta = self._answers[0].next_nowait()
            return None if delta is None else AnswerEvent(0, delta)
        with suppress(trio.WouldBlock):
            return self._pieces.receive_nowait()
        return None

    def _end(self) -> bytes:
        if self._open:
            return b""
        self._over = True
        return self._dialect.closing([usage_of(answer) for answer in self._answers])
