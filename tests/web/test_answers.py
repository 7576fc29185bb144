"""Several answers of one response, collected whole."""

from __future__ import annotations

import pytest
import trio

from trouper.actors.runtime.answer import Answer, TimeLimits
from trouper.protocol.problems import Problem, RequestFailed
from trouper.protocol.replies import Accepted, Delta, Failed, Finished, Reply
from trouper.protocol.requests import Timeouts
from trouper.web.streaming.response_streams import collect_all

Sender = trio.MemorySendChannel[Reply]


def answers(count: int) -> tuple[list[Sender], list[Answer]]:
    pairs = [trio.open_memory_channel[Reply](9) for _ in range(count)]
    return [send for send, _ in pairs], [
        Answer(f"r{place}", Accepted((1,), 9), receive, TimeLimits(Timeouts(), 0.0))
        for place, (_, receive) in enumerate(pairs)
    ]


async def test_they_come_in_their_own_order_whoever_ends_first(
    autojump_clock: trio.abc.Clock,
) -> None:
    senders, asked = answers(3)

    async def end() -> None:
        for place in (2, 0, 1):
            await trio.sleep(1)
            senders[place].send_nowait(Delta(str(place), (place,)))
            senders[place].send_nowait(Finished("stop", 1))
            senders[place].close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        choices = await collect_all(asked)
    assert [(choice.text, choice.tokens) for choice in choices] == [
        ("0", (0,)),
        ("1", (1,)),
        ("2", (2,)),
    ]


async def test_the_first_failure_is_everybodys(autojump_clock: trio.abc.Clock) -> None:
    """A part of an answer is never returned as if it were whole."""
    senders, asked = answers(2)
    senders[0].send_nowait(Delta("half", (1,)))
    senders[1].send_nowait(Failed(Problem(504, "too late", code="token_timeout")))
    with pytest.raises(RequestFailed, match="too late"):
        await collect_all(asked)
    for sender, answer in zip(senders, asked, strict=True):
        sender.close()
        answer.close()
