"""Worlds of several models: clients with keys, adapters and limits ask for models that operators
load, unload and pin meanwhile. When all have ended, nothing is held for anybody."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any, TypeVar
from unittest import mock

import attrs
import trio

from tests.fakes import FakeEngine, card
from tests.sim.seeded import run_seeded
from trouper import (
    Answer,
    Finished,
    Generate,
    ModelManager,
    ModelUnusable,
    RequestFailed,
    Runtime,
    Settings,
    TextPrompt,
    TokenPrompt,
)
from trouper.actors.graph import run_graph
from trouper.actors.runtime import worker_threads
from trouper.actors.runtime.model_manager import run_model_manager
from trouper.actors.runtime.model_table import AWAY
from trouper.actors.runtime.prompt_tokenizing import LONG_TEXT
from trouper.actors.runtime.supervision import RestartLimit
from trouper.protocol.api_keys import ApiKey
from trouper.protocol.grammar import Grammar
from trouper.protocol.model import AdapterCard, AdapterPlan, LoadedModel, Measured
from trouper.protocol.plans import Plan
from trouper.protocol.record import RequestRecord
from trouper.protocol.requests import BATCH_PRIORITY
from trouper.web.http.byte_budget import ByteBudget, Holding
from trouper.web.keys.key_limits import KeyAccount, KeyAccounts

WEIGHTS = {"small": 10, "middle": 20, "large": 60}
CLIENTS, OPERATORS = 30, 8
TOO_LONG_S = 10_000
FOREVER = float("inf")
PROMPT_BYTES = 4
"""Held for a token."""
T = TypeVar("T")


class SimEngine(FakeEngine):
    def __init__(self, name: str, adapters: dict[str, int], chance: Random) -> None:
        super().__init__(before_step=self._suffer)
        self._name, self._chance, self._ended = name, chance, trio.Event()
        self._bytes = adapters

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        try:
            await super().run(task_status=task_status)
        finally:
            self._ended.set()

    async def load(self) -> LoadedModel:
        await trio.sleep(self._chance.choice((0.1, 0.1, 2, 20)))
        nbytes = sum(self._bytes.values())
        cards = [await super(SimEngine, self).load_adapter(name, "") for name in self._bytes]
        weights = {"weights_bytes": WEIGHTS[self._name] + nbytes, "adapter_bytes": nbytes}
        changes: dict[str, Any] = {"id": self._name, "adapters": tuple(cards)} | weights
        return LoadedModel(attrs.evolve(card(), **changes), self.tokenizer)

    async def plan_adapter(self, name: str, directory: str) -> AdapterPlan:
        await self._work()
        size = int(directory)
        return AdapterPlan(
            added_bytes=size, total_bytes=size + sum(self._bytes.values()), loading_bytes=size
        )

    async def load_adapter(self, name: str, directory: str) -> AdapterCard:
        await self._work()
        self._bytes[name] = int(directory)
        return await super().load_adapter(name, directory)

    async def unload_adapter(self, name: str) -> int:
        await self._work()
        del self._bytes[name]
        return sum(self._bytes.values())

    async def _work(self) -> None:
        """Beside the steps, on a thread that ends with the engine."""
        with trio.move_on_after(self._chance.random()):
            await self._ended.wait()
        if self._ended.is_set():
            raise ModelUnusable("the model was unloaded")

    async def _suffer(self, _: Plan) -> None:
        await trio.sleep(self._chance.choice((0.01, 0.2)))
        if self._chance.random() < 0.002:
            raise RuntimeError("the device died")


@attrs.define(eq=False)
class World:
    chance: Random
    manager: ModelManager = attrs.field(init=False)
    accounts: KeyAccounts = attrs.field(factory=lambda: KeyAccounts(trio.current_time))
    budget: ByteBudget = attrs.field(factory=lambda: ByteBudget(300_000))
    outcomes: Counter[str] = attrs.field(factory=Counter)

    async def run(self) -> None:
        chance = self.chance
        settings: dict[str, Any] = {
            "completion_batch_size": chance.choice((1, 4)),
            "max_queue_size": chance.choice((4, 128)),
            "queue_timeout_s": chance.choice((0, 5)),
            "priority_max_wait_s": chance.choice((0, 1)),
            "no_ssd": True,
        }
        run = partial(
            run_model_manager,
            [Settings(model=name, **settings) for name in WEIGHTS],
            (),
            self._start,
            _measure,
            chance.choice((30, 70, 100)),
            default_name="none",
            max_models=chance.choice((None, 1, 2)),
            ttl_s=chance.choice((0.0, 3.0)),
        )
        with trio.fail_after(TOO_LONG_S):
            async with trio.open_nursery() as nursery:
                self.manager = await nursery.start(
                    lambda *, task_status: run(task_status=task_status)
                )
                async with trio.open_nursery() as everybody:
                    for number in range(CLIENTS):
                        everybody.start_soon(self._live, Random(f"{chance.random()} {number}"))
                    for number in range(OPERATORS):
                        everybody.start_soon(self._operate, Random(f"{chance.random()} {number}"))
                # Last rows are dropped; suspects of a crash are tried to their end.
                await trio.sleep(5)
                while self._works():  # noqa: ASYNC110
                    await trio.sleep(5)
                self._check()
                await self.manager.drain(5)

    async def _start(self, settings: Settings, /, *, task_status: trio.TaskStatus[Runtime]) -> None:
        adapters = {
            name: int(size) for name, _, size in (one.partition("=") for one in settings.adapter)
        }
        engine = SimEngine(str(settings.model), adapters, self.chance)
        limit = RestartLimit(pause_s=0.01)
        await run_graph(settings, engine, limit=limit, task_status=task_status)

    # -- clients and operators --------------------------------------------------------------------

    async def _live(self, chance: Random) -> None:
        await trio.sleep(chance.random() * 12)
        with trio.move_on_after(
            chance.choice((FOREVER, FOREVER, FOREVER, 0.1, 3)) * chance.random()
        ) as left:
            try:
                await self._ask(chance)
                self.outcomes["answered"] += 1
            except RequestFailed as failed:
                self.outcomes[str(failed.problem.code)] += 1
        self.outcomes["left"] += left.cancelled_caught

    async def _ask(self, chance: Random) -> None:
        """As the HTTP server does: what is taken is given back in the opposite order."""
        name = chance.choice("abc")
        key = ApiKey(key=name, name=name, tokens_per_minute=5000 if name == "a" else None)
        account, holding = self.accounts.of(key), self.budget.open(name)
        with ExitStack() as owned:
            owned.callback(holding.give_back)
            lease = await self.manager.lease(chance.choice([*WEIGHTS]))
            owned.callback(lease.release)
            answers = list[Answer]()
            for _ in range(chance.choice((1, 1, 3))):
                answer = await self._send(lease.runtime, account, holding, chance)
                owned.callback(answer.close)
                answers.append(answer)
            for answer in answers:
                await answer.wait_accepted()
            for answer in answers:
                while not isinstance(await answer.next(), Finished):
                    if chance.random() < 0.02:
                        answer.cancel()

    async def _send(
        self, runtime: Runtime, account: KeyAccount, holding: Holding, chance: Random
    ) -> Answer:
        reservation = account.reserve(runtime.model.id)

        def admit(prompt_tokens: int, max_tokens: int, named: bool) -> int:
            holding.take(PROMPT_BYTES * prompt_tokens)
            return reservation.admit(prompt_tokens, max_tokens, named)

        def ended(record: RequestRecord) -> None:
            self.outcomes[record.reason] += 1
            reservation.end(record)

        tokens = tuple(chance.randrange(256) for _ in range(chance.choice((1, 30, 600))))
        text = TextPrompt("x" * (LONG_TEXT + 1) if chance.random() < 0.5 else "y")
        request = Generate(
            request_id=str(chance.random()),
            prompt=text if chance.random() < 0.3 else TokenPrompt(tokens),
            max_tokens=chance.choice((None, 1, 40)),
            adapter=chance.choice(("", "", "", "one", "two")),
            tenant=account.key.name,
            priority=chance.choice((0, 0, 3, BATCH_PRIORITY)),
            grammar=Grammar("regex", "a+") if chance.random() < 0.2 else None,
        )
        return await runtime.send(request, ended, admit)

    async def _operate(self, chance: Random) -> None:
        control, name = self.manager.control, chance.choice([*WEIGHTS])
        adapter, size = chance.choice(("one", "two")), chance.choice(("1", "5", "30"))
        await trio.sleep(chance.random() * 12)
        with trio.move_on_after(chance.choice((FOREVER, 1))):
            try:
                match chance.randrange(5):
                    case 0:
                        await control.load(name, pinned=chance.choice((None, True))).done.wait()
                    case 1:
                        force, sleep = chance.random() < 0.3, chance.random() < 0.5
                        await control.unload(name, force=force, sleep=sleep).done.wait()
                    case 2:
                        control.pin(name, pinned=False)
                    case 3:
                        await control.load_adapter(name, adapter, size)
                    case _:
                        await control.unload_adapter(name, adapter)
            except (RequestFailed, ModelUnusable) as failed:
                self.outcomes[type(failed).__name__] += 1

    # -- the end ----------------------------------------------------------------------------------

    def _works(self) -> bool:
        runtimes = [row.runtime for row in self.manager.models if row.runtime is not None]
        counts = [runtime.health().scheduler for runtime in runtimes]
        return any(each.active_sequences or each.queued_requests for each in counts) or any(
            row.state not in (*AWAY, "ready") for row in self.manager.models
        )

    def _check(self) -> None:
        for row in self.manager.models:
            assert (row.leases, row.waits) == (0, [])
            if row.runtime is None:
                continue
            counts = row.runtime.health().scheduler
            ended = counts.requests_completed + counts.requests_errored + counts.requests_withdrawn
            assert counts.total_requests == ended, counts
            assert not +row.runtime._adapters._running
            assert row.weights_bytes == row.runtime.weights_bytes
        assert not self.manager.table._growths
        assert (self.budget.held, self.budget._clients) == (0, Counter())
        for account in self.accounts._accounts.values():
            assert account.tokens._held == 0


async def _measure(settings: Settings) -> Measured:
    await trio.sleep(0.01)
    return Measured(WEIGHTS[str(settings.model)], card().created)


def run_world(seed: int) -> World:
    """Raises, whatever is wrong with it."""
    world = World(Random(seed))
    seconds = Random(f"threads of {seed}")

    async def on_thread(work: Callable[[], T], *_: Any, **__: Any) -> T:
        await trio.sleep(seconds.random() * 0.3)
        return work()

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with mock.patch.object(worker_threads, "run_on_thread", on_thread):
            run_seeded(seed, world.run)
    finally:
        logging.disable(before)
    return world
