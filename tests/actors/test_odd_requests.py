"""Requests of a program that embeds the runtime whose values no schema has checked: each has one
end, and costs nobody else anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.actors.bench import Opened, code, generate, heard, running, scheduling
from trouper import ChatPrompt, InfillPrompt, RequestFailed, Runtime, TextPrompt, TokenPrompt
from trouper.actors.scheduling.admission import Admission
from trouper.actors.scheduling.answer_output import AnswerOutput
from trouper.actors.scheduling.prefix_cache import Found, PrefixCache
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.tree_node import Chain
from trouper.protocol.health import SchedulerStats
from trouper.protocol.record import RequestRecord
from trouper.protocol.replies import Finished
from trouper.protocol.requests import CacheScope, Generate
from trouper.protocol.watch import Watch

ODD: list[tuple[dict[str, Any], int, str]] = [
    ({"max_tokens": -100}, 400, "invalid_value"),
    ({"max_tokens": -1}, 400, "invalid_value"),
    ({"cache_salt": None}, 400, "invalid_type"),
    ({"sampling": None}, 400, "invalid_type"),
    ({"prompt": "hello"}, 400, "invalid_type"),
    ({"prompt": TextPrompt(None)}, 422, "intake_failed"),  # type: ignore[arg-type]
    ({"prompt": InfillPrompt(None, "b")}, 422, "intake_failed"),  # type: ignore[arg-type]
    ({"prompt": TokenPrompt(("a",))}, 400, "invalid_type"),  # type: ignore[arg-type]
    ({"prompt": TokenPrompt((65, 66.7))}, 400, "invalid_type"),  # type: ignore[arg-type]
    ({"prompt": TokenPrompt(None)}, 400, "invalid_type"),  # type: ignore[arg-type]
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
    assert [(record.request_id, record.reason, record.code) for record in records] == [
        ("odd", "refused", error)
    ]


@pytest.fixture
def admission_crashes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Ids of the requests that crash admission, each as often as it is listed; "odd" always
    does."""
    look, crashes = Admission._look_up, ["odd"]

    def looking(self: Admission, sequence: Sequence) -> Found | None:
        name = sequence.request.request_id
        if name in crashes:
            if name != "odd":
                crashes.remove(name)
            raise RuntimeError("its like was not thought of")
        return look(self, sequence)

    monkeypatch.setattr(Admission, "_look_up", looking)
    yield crashes
    assert crashes == ["odd"]


async def refusal(runtime: Runtime, request: Generate) -> tuple[int, str | None]:
    with pytest.raises(RequestFailed) as failed, await runtime.submit(request) as answer:
        await answer.next()
    return failed.value.problem.status, failed.value.problem.code


@pytest.mark.usefixtures("admission_crashes")
async def test_a_request_that_crashes_admission_is_refused_and_others_go_on(
    autojump_clock: MockClock,
) -> None:
    """Found by review: each scheduler took it over from the one before, until the restart limit
    ended the server for everybody."""
    async with running() as runtime:
        with await runtime.submit(generate("other", max_tokens=300)) as other:
            await other.next()
            for _ in range(5):
                assert await refusal(runtime, generate("odd", tokens=7)) == (
                    422,
                    "request_crashes_engine",
                )
            assert len([delta async for delta in other]) == 299
        stats = runtime.health().scheduler
        assert (stats.recovery.crashes, stats.recovery.convicted, stats.requests_errored) == (
            2,
            1,
            5,
        )


@pytest.mark.usefixtures("admission_crashes")
async def test_many_requests_that_crash_admission_do_not_end_the_server(
    autojump_clock: MockClock,
) -> None:
    async with running() as runtime:
        for tokens in range(4, 13):
            assert await refusal(runtime, generate("odd", tokens=tokens)) == (
                422,
                "request_crashes_engine",
            )
        assert runtime.health().ready
        with await runtime.submit(generate(max_tokens=5)) as answer:
            assert len([delta async for delta in answer]) == 5


async def test_a_crash_in_admission_that_does_not_come_again_costs_nobody_anything(
    autojump_clock: MockClock, admission_crashes: list[str]
) -> None:
    async with running() as runtime:
        with await runtime.submit(generate("other", max_tokens=50)) as other:
            await other.next()
            admission_crashes.append("late")
            with await runtime.submit(generate("late", tokens=7, max_tokens=9)) as late:
                assert len([delta async for delta in late]) == 9
            assert len([delta async for delta in other]) == 49
        recovery = runtime.health().scheduler.recovery
        assert (recovery.crashes, recovery.convicted, recovery.quarantined) == (1, 0, 0)


@pytest.mark.parametrize("times", [1, 9])
async def test_a_crash_where_requests_are_carried_over_loses_no_other(
    autojump_clock: MockClock,
    admission_crashes: list[str],
    monkeypatch: pytest.MonkeyPatch,
    times: int,
) -> None:
    """The scheduler after a crash takes several up; each has its end, also where one of them
    crashes that scheduler, once or always."""
    make, armed = PrefixCache.chain, 0

    def making(self: PrefixCache, tokens: bytes, salt: str, scope: CacheScope) -> Chain:
        nonlocal armed
        if salt == "strange" and armed:
            armed -= 1
            raise RuntimeError("its like was not thought of")
        return make(self, tokens, salt, scope)

    monkeypatch.setattr(PrefixCache, "chain", making)
    async with running() as runtime:
        requests = [
            generate(name, tokens=at, max_tokens=50, cache_salt=name)
            for at, name in enumerate(("one", "strange", "two"), 4)
        ]
        one, odd, two = [await runtime.submit(request) for request in requests]
        for answer in (one, odd, two):
            await answer.next()
        armed = times
        admission_crashes.append("late")
        with await runtime.submit(generate("late", tokens=9, max_tokens=9)) as late, one, odd, two:
            assert [len([delta async for delta in answer]) for answer in (late, one, two)] == [
                9,
                49,
                49,
            ]
            if times == 1:
                assert len([delta async for delta in odd]) == 49
            else:
                with pytest.raises(RequestFailed) as failed:
                    _ = [delta async for delta in odd]
                assert failed.value.problem.code == "request_crashes_engine"
        assert runtime.health().ready


async def test_a_request_whose_rest_cannot_be_sent_loses_no_other(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token crashes the scheduler, and again does what is left of its text, where it is
    refused. The others are handed over all the same."""
    append, flush = Sequence.append_token, AnswerOutput.flush

    def appending(self: Sequence, *arguments: Any) -> Finished | None:
        if self.request.request_id == "strange" and self.num_output_tokens == 3:
            raise RuntimeError("its like was not thought of")
        return append(self, *arguments)

    def flushing(self: AnswerOutput) -> None:
        if self.max_tokens == 51:
            raise RuntimeError("nor was this")
        flush(self)

    monkeypatch.setattr(Sequence, "append_token", appending)
    monkeypatch.setattr(AnswerOutput, "flush", flushing)
    async with running() as runtime:
        one, two = [
            await runtime.submit(generate(name, tokens=4, max_tokens=50, cache_salt=name))
            for name in ("one", "two")
        ]
        with (
            await runtime.submit(generate("strange", tokens=5, max_tokens=51)) as strange,
            one,
            two,
        ):
            assert [len([delta async for delta in answer]) for answer in (one, two)] == [50, 50]
            with pytest.raises(RequestFailed) as failed:
                _ = [delta async for delta in strange]
        assert failed.value.problem.code == "request_crashes_engine"
        assert runtime.health().ready


async def test_a_request_that_crashes_the_scheduler_on_its_arrival_is_answered(
    opened: Opened,
) -> None:
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
