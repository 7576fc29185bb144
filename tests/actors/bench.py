"""What the tests of single actors share: real channels, and a scheduler whose engine is the test
itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from typing import Any

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from tests.fakes import ByteTokenizer, FakeEngine, card
from trouper import Generate, Runtime, Settings, TokenPrompt, run_runtime
from trouper.actors.graph import CHANNELS
from trouper.actors.graph import _answer_undelivered as answer_undelivered
from trouper.actors.runtime.channels import Channels
from trouper.actors.runtime.submission import Submission, open_submission
from trouper.actors.scheduler import SchedulerEdges, schedule
from trouper.actors.scheduling.core_edges import CoreWatches
from trouper.protocol.batch import NOTHING_SHOWN, BatchStats
from trouper.protocol.health import DirectoryStats, MemoryStatus, SchedulerStats
from trouper.protocol.model import LoadedModel, ModelCard
from trouper.protocol.plan_channel import plan_channel
from trouper.protocol.plans import PLANS_IN_FLIGHT, Plan, RowId, Stepped
from trouper.protocol.problems import DRAINING
from trouper.protocol.replies import Failed, Finished, Reply
from trouper.protocol.watch import Watch

Replies = trio.MemoryReceiveChannel[Reply]


def generate(request_id: str = "r", tokens: int = 3, **more: Any) -> Generate:
    more.setdefault("prompt", TokenPrompt(tuple(range(1, tokens + 1))))
    return Generate(request_id=request_id, **more)


@attrs.define(eq=False)
class Opened:
    """The reply channels of one test."""

    by_test: list[Submission] = attrs.field(factory=list)
    in_runtime: list[Submission] = attrs.field(factory=list)

    def submission(self, request: Generate) -> tuple[Submission, Replies]:
        """The test reads it; whoever owns the submission must end it."""
        submission, replies = open_submission(request, Settings())
        self.by_test.append(submission)
        return submission, replies

    def by_runtime(self, *arguments: Any) -> tuple[Submission, Replies]:
        submission, replies = open_submission(*arguments)
        self.in_runtime.append(submission)
        return submission, replies

    def still_open(self) -> list[Submission]:
        states = [
            (submission, submission.replies.statistics())
            for submission in self.by_test + self.in_runtime
        ]
        return [
            submission
            for submission, state in states
            if state.open_send_channels
            or (submission in self.in_runtime and state.open_receive_channels)
        ]


def heard(answer: Replies) -> list[Reply]:
    """All that waits in a reply channel."""
    replies: list[Reply] = []
    while True:
        try:
            replies.append(answer.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            return replies


def ends(replies: list[Reply]) -> list[Reply]:
    return [reply for reply in replies if isinstance(reply, Finished | Failed)]


def code(replies: list[Reply]) -> str | None:
    """Of the one failure that ended it."""
    [end] = ends(replies)
    assert isinstance(end, Failed)
    assert replies[-1] is end
    return end.problem.code


@attrs.define(eq=False)
class Bench:
    """A scheduler alone. The test is everything around it."""

    admitted: trio.MemorySendChannel[Submission]
    plans: trio.MemoryReceiveChannel[Plan]
    results: trio.MemorySendChannel[Stepped]
    stats: Watch[SchedulerStats]
    memory: Watch[MemoryStatus]
    last_viewed_at: Watch[float]
    batch: Watch[BatchStats]
    opened: Opened
    ended: trio.Event = attrs.field(factory=trio.Event)
    unanswered: list[Plan] = attrs.field(factory=list)
    unprefilled: dict[RowId, int] = attrs.field(factory=dict)

    async def ask(
        self, request_id: str = "r", tokens: int = 3, max_tokens: int = 5, **more: Any
    ) -> Replies:
        request = generate(request_id, tokens, max_tokens=max_tokens, **more)
        submission, answer = self.opened.submission(request)
        assert isinstance(request.prompt, TokenPrompt)
        await self.admitted.send(
            attrs.evolve(submission, prompt=request.prompt.tokens, max_tokens=max_tokens)
        )
        await wait_all_tasks_blocked()
        return answer

    async def new_plans(self) -> list[Plan]:
        """What the scheduler sends until it waits; never more than two are unanswered."""
        await wait_all_tasks_blocked()
        new = []
        while True:
            try:
                new.append(self.plans.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel):
                break
        for plan in new:
            for admit in plan.admit:
                restored = admit.restore.tokens if admit.restore else 0
                self.unprefilled[admit.row] = len(admit.prompt) // 4 - restored
        self.unanswered += new
        assert len(self.unanswered) <= PLANS_IN_FLIGHT
        return new

    async def answer(self, token: int = 97, seconds: float = 0.01) -> Plan:
        """Answer the oldest plan: the same token for each row that produces one."""
        plan = self.unanswered.pop(0)
        for chunk in plan.prefill:
            self.unprefilled[chunk.row] -= chunk.tokens
        rows = plan.decode + tuple(
            chunk.row for chunk in plan.prefill if self.unprefilled[chunk.row] == 0
        )
        self.results.send_nowait(Stepped(plan.step, rows, (token,) * len(rows), (), seconds))
        await wait_all_tasks_blocked()
        return plan

    async def play(self, token: int = 97, most: int = 10_000) -> list[Plan]:
        """Answer as an engine does until the scheduler has nothing left to do; every plan, in
        order."""
        played: list[Plan] = []
        for _ in range(most):
            await self.new_plans()
            if not self.unanswered:
                return played
            # Plan n-1 is answered when n has arrived: work is never left unflushed.
            if len(self.unanswered) == 1:
                assert not self.unanswered[0].has_work
            played.append(await self.answer(token))
        raise AssertionError("the scheduler never rests")


@asynccontextmanager
async def scheduling(
    opened: Opened,
    stats: Watch[SchedulerStats] | None = None,
    told: ModelCard | None = None,
    **more: Any,
) -> AsyncIterator[Bench]:
    """At the end the scheduler is cancelled, unless it ended before. `facts`: those of one that
    crashed. `told`: of the model."""
    channels = Channels(CHANNELS)
    admitted, admitted_in = channels.open("admitted")
    sending, plans_in = channels.open("plans")
    plans, _ = plan_channel(sending, plans_in)
    results, results_in = channels.open("results")
    last_viewed_at, batch = Watch(-inf), Watch(NOTHING_SHOWN)
    stats, memory = stats or Watch(SchedulerStats()), Watch(MemoryStatus())
    orders, orders_in = channels.open("orders")
    edges = SchedulerEdges(
        admitted=admitted_in,
        plans=plans,
        results=results_in,
        orders=orders,
        disk_known=trio.Event(),
        watches=CoreWatches(
            stats=stats,
            memory=memory,
            directory=Watch(DirectoryStats()),
            last_viewed_at=last_viewed_at,
            batch=batch,
        ),
    )
    bench = Bench(admitted, plans_in, results, stats, memory, last_viewed_at, batch, opened)

    async def actor() -> None:
        try:
            settings = Settings(**{"gather_ms": 0, "no_ssd": True, **more})
            await schedule(edges, LoadedModel(told or card(), ByteTokenizer()), "fa4e", settings)
        finally:
            bench.ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(actor)
        await wait_all_tasks_blocked()
        yield bench
        nursery.cancel_scope.cancel(reason="the test is over")
    orders.close()
    orders_in.close()
    answer_undelivered(trio.open_memory_channel[Submission](0)[1], admitted_in, DRAINING)


@asynccontextmanager
async def running(engine: FakeEngine | None = None, **more: Any) -> AsyncIterator[Runtime]:
    """The whole graph around a fake engine; drained at the end."""
    settings = Settings(**{"no_ssd": True, "gather_ms": 0, **more})
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(
            partial(run_runtime, settings, engine=engine or FakeEngine())
        )
        yield runtime
        await runtime.drain(10)
