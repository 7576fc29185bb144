"""Requests of a program that embeds the runtime whose values no schema has checked: each has one end, and costs nobody else anything."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.actors.bench import Opened, code, generate, heard, running, scheduling
from trouper import ChatPrompt, InfillPrompt, RequestFailed, TextPrompt, TokenPrompt
from trouper.protocol.health import SchedulerStats
from trouper.protocol.record import RequestRecord
from trouper.protocol.watch import Watch

ODD: list[tuple[dict[str, Any], int, str]] = [
    ({"max_tokens": -100}, 400, "invalid_value"),
    ({"max_tokens": -1}, 400, "invalid_value"),
    ({"cache_salt": None}, 400, "invalid_type"),
    ({"sampling": None}, 400, "invalid_type"),
    ({"prompt": "hello"}, 400, "invalid_type"),
    ({"prompt": TextPrompt(None)}, 422, "intake_failed"),  # type: ignore[arg-type]
    ({"prompt": InfillPrompt(None, "b")}, 422, "intake_failed"),  # type: ignore[arg-type]
    ({"prompt": TokenPrompt(("a",))}, 422, "intake_failed"),  # type: ignore[arg-type]
    ({"prompt": TokenPrompt(None)}, 422, "intake_failed"),  # type: ignore[arg-type]
    ({"prompt": ChatPrompt(None)}, 422, "intake_failed"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("more", "status", "error"), ODD)
async def test_an_odd_request_is_refused_and_others_go_on(
    more: dict[str, Any], status: int, error: str, autojump_clock: MockClock
) -> None:
    records: list[RequestRecord] = []
    async with running() as runtime:
        with await runtime.submit(generate("other", max_tokens=50)) as answer:
            with pytest.raises(RequestFailed) as failed:
                await runtime.submit(generate("odd", **more), records.append)
            assert (failed.value.problem.status, failed.value.problem.code) == (status, error)
            assert len([delta async for delta in answer]) == 50
        assert [actor.restarts for actor in runtime.health().actors] == [0, 0, 0, 0]
    assert [(record.request_id, record.reason, record.code) for record in records] == [("odd", "refused", error)]


async def test_a_request_that_crashes_the_scheduler_on_its_arrival_is_answered(opened: Opened) -> None:
    """No actor's queue has it yet, and none would have told its client."""
    submission, answer = opened.submission(generate(cache_salt=None))
    stats = Watch(SchedulerStats())

    async def schedule() -> None:
        async with scheduling(opened, stats) as bench:
            bench.admitted.send_nowait(submission)
            await trio.sleep_forever()

    with pytest.raises(ExceptionGroup):
        await schedule()
    assert code(heard(answer)) == "intake_failed"
    assert (stats.latest.total_requests, stats.latest.requests_errored) == (1, 1)
