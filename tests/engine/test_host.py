"""The engine's thread, and the whole runtime on it: crashes cost a session, never the thread."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import attrs
import mlx.core as mx
import numpy as np
import pytest
import trio
from mlx_lm.models import llama
from trio.testing import wait_all_tasks_blocked

from tests import arithmetic
from tests.families import build, prompts, reference, save
from trouper import (
    Delta,
    Generate,
    ModelUnusable,
    Runtime,
    Sampling,
    Settings,
    TokenPrompt,
    run_runtime,
)
from trouper.actors.model_stepper import step_model
from trouper.engine import host, step_loop
from trouper.engine.host import MlxEngine
from trouper.engine.platform import device
from trouper.engine.step import Launched, StepEngine
from trouper.engine.step_loop import ReadAhead
from trouper.protocol.plan_channel import plan_channel
from trouper.protocol.plans import PLANS_IN_FLIGHT, Admit, Chunk, Plan, RowId, Stepped

PROMPTS = prompts((3, 17, 33, 40, 1, 5, 21, 12))
TOKENS = 20


class Broken(Exception):
    """What the model raises."""


class NoMemory(RuntimeError):
    """As MLX raises it."""

    def __str__(self) -> str:
        return "[malloc] Unable to allocate 7 bytes."


class Panic(BaseException):
    """As PyO3 raises what was a panic in Rust: no `Exception`."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save("llama", tmp_path_factory.mktemp("tiny") / "llama"))


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    model = build("llama")
    return [reference(model, prompt, TOKENS) for prompt in PROMPTS]


@attrs.define(eq=False)
class Spy:
    """Sees every forward pass of the model, on the thread that makes it."""

    calls: int = 0
    threads: set[int] = attrs.field(factory=set)
    before: Callable[[], None] | None = None

    def call(self) -> None:
        self.calls += 1
        self.threads.add(threading.get_ident())
        if self.before is not None:
            self.before()

    def raise_after(self, calls: int, error: type[BaseException] = Broken) -> None:
        """Once, in the pass after so many more."""
        left = iter(range(calls))

        def count() -> None:
            if next(left, None) is None:
                self.before = None
                raise error("the device caught fire")

        self.before = count


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    seen, plain = Spy(), llama.Model.__call__

    def spied(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.call()
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(llama.Model, "__call__", spied)
    return seen


def engine_threads() -> list[str]:
    """Threads that an engine has."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("engine of")]


@asynccontextmanager
async def running_engine(tiny: str) -> AsyncIterator[MlxEngine]:
    engine = MlxEngine(Settings(model=tiny))
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await engine.load()
        assert len(engine_threads()) == 1
        yield engine
        nursery.cancel_scope.cancel()
    assert engine_threads() == []


def script(prompt: Sequence[int], tokens: int, row: int = 0) -> Iterator[Plan]:
    """One row from its prompt to its end; the last plan has no work and flushes."""
    name = RowId(row)
    admit = Admit(name, np.array(prompt, "<i4").tobytes(), Sampling(temperature=0))
    yield Plan(0, admit=(admit,), prefill=(Chunk(name, len(prompt)),))
    for step in range(1, tokens):
        yield Plan(step, decode=(name,))
    yield Plan(tokens, drop=(name,))


async def play(engine: MlxEngine, plans: Iterator[Plan], each: Callable[[Stepped], None]) -> None:
    """A session: as Scheduler does it, two plans ahead at most."""
    ordered, ordered_in = plan_channel(*trio.open_memory_channel[Plan](PLANS_IN_FLIGHT))
    results, results_in = trio.open_memory_channel[Stepped](PLANS_IN_FLIGHT)
    async with trio.open_nursery() as together:
        together.start_soon(step_model, ordered_in, results, engine)
        with ordered, results_in, suppress(trio.EndOfChannel, trio.BrokenResourceError):
            unanswered = 0
            for plan in plans:
                await ordered.send(plan)
                unanswered += 1
                while unanswered == PLANS_IN_FLIGHT or (unanswered and not plan.has_work):
                    each(await results_in.receive())
                    unanswered -= 1


async def answer(engine: MlxEngine, prompt: Sequence[int], tokens: int = TOKENS) -> list[int]:
    got: list[int] = []
    await play(engine, script(prompt, tokens), lambda stepped: got.extend(stepped.tokens))
    return got


async def test_two_sessions_one_after_another(tiny: str, wanted: list[list[int]], spy: Spy) -> None:
    async with running_engine(tiny) as engine:
        for prompt, alone in zip(PROMPTS[:3], wanted, strict=False):
            assert await answer(engine, prompt) == alone
        assert len(spy.threads) == 1
        assert threading.get_ident() not in spy.threads
        assert 0 < engine.memory().active_bytes < engine.memory().limit_bytes


class Fixed(ReadAhead):
    """Reads always early, or never."""

    def record(self, waited_s: float, step_s: float) -> None:
        pass


@pytest.mark.parametrize("early", [False, True])
async def test_tokens_do_not_depend_on_when_they_are_read(
    tiny: str, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """As on a device that takes a step while the one before it runs: there after the launch, or
    before it."""
    monkeypatch.setattr(device, "runs_ahead", lambda: True)
    monkeypatch.setattr(step_loop, "ReadAhead", lambda: Fixed(early))
    async with running_engine(tiny) as engine:
        for prompt, alone in zip(PROMPTS[:3], wanted, strict=False):
            assert await answer(engine, prompt) == alone


@pytest.mark.parametrize(("ahead", "early"), [(False, False), (True, True), (True, False)])
async def test_what_rows_hold_is_counted_only_where_it_decides(
    tiny: str, monkeypatch: pytest.MonkeyPatch, ahead: bool, early: bool
) -> None:
    """Where no step is in flight, or tokens are read early anyway, nobody asks every buffer for its
    size in every step."""
    counted: list[int] = []

    def count(engine: StepEngine) -> int:
        counted.append(engine._rows.nbytes)
        return counted[-1]

    monkeypatch.setattr(device, "runs_ahead", lambda: ahead)
    monkeypatch.setattr(step_loop, "ReadAhead", lambda: Fixed(early))
    monkeypatch.setattr(StepEngine, "nbytes", property(count))
    async with running_engine(tiny) as engine:
        await answer(engine, PROMPTS[0])
    assert len(counted) == (TOKENS - 2 if ahead and not early else 0)


async def test_a_first_token_alone_is_read_before_the_next_step_is_launched(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device that runs ahead. Later tokens are read behind the launch of the next step."""
    done: list[tuple[str, int]] = []
    launch, send = StepEngine.launch, MlxEngine._send_result

    def launching(engine: StepEngine, plan: Plan) -> Launched:
        done.append(("launched", plan.step))
        return launch(engine, plan)

    def sending(engine: MlxEngine, results: Any, stepped: Stepped) -> None:
        done.append(("sent", stepped.step))
        send(engine, results, stepped)

    monkeypatch.setattr(device, "runs_ahead", lambda: True)
    monkeypatch.setattr(step_loop, "ReadAhead", lambda: Fixed(early=False))
    monkeypatch.setattr(StepEngine, "launch", launching)
    monkeypatch.setattr(MlxEngine, "_send_result", sending)
    async with running_engine(tiny) as engine:
        await answer(engine, PROMPTS[0])
    first = next(step for what, step in done if what == "sent")
    # On a device that compiles its kernels, other steps ran before.
    begin = done.index(("sent", first)) - 1
    assert done[begin : begin + 5] == [
        ("launched", first),
        ("sent", first),
        ("launched", first + 1),
        ("launched", first + 2),
        ("sent", first + 1),
    ]


@pytest.mark.parametrize("after", [0, 1, 7])
async def test_a_crash_reaches_step_and_the_thread_lives_on(
    tiny: str, wanted: list[list[int]], spy: Spy, after: int
) -> None:
    async with running_engine(tiny) as engine:
        spy.raise_after(after)
        with pytest.RaisesGroup(Broken):
            await answer(engine, PROMPTS[1])
        assert await answer(engine, PROMPTS[1]) == wanted[1]
        assert len(spy.threads) == 1


async def test_nothing_of_a_crashed_session_is_held(
    tiny: str, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV is gone when the error is, not when the garbage collector comes by: the next session
    needs the memory."""
    sessions: list[weakref.ref[StepEngine]] = []

    def noted(*args: Any, **more: Any) -> StepEngine:
        made = StepEngine(*args, **more)
        sessions.append(weakref.ref(made))
        return made

    monkeypatch.setattr(host, "StepEngine", noted)
    async with running_engine(tiny) as engine:
        with collector_off():
            before = mx.get_active_memory()
            spy.raise_after(5)
            with suppress(BaseExceptionGroup):
                await answer(engine, PROMPTS[1])
            assert {session() for session in sessions} == {None}
            assert mx.get_active_memory() == before


@contextmanager
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_f18_a_cancelled_session_ends_with_the_step_in_hand(
    tiny: str, wanted: list[list[int]], spy: Spy
) -> None:
    """Not before: the device still writes. What follows is the rest of this plan, and the one that
    was sent already."""
    async with running_engine(tiny) as engine:
        entered, release, token = (
            trio.Event(),
            threading.Event(),
            trio.lowlevel.current_trio_token(),
        )

        def hold() -> None:
            trio.from_thread.run_sync(entered.set, trio_token=token)
            assert release.wait(30)

        ended = trio.Event()
        scope = trio.CancelScope()

        async def session() -> None:
            with scope:
                await answer(engine, PROMPTS[1])
            ended.set()

        async with trio.open_nursery() as nursery:
            spy.before = hold
            nursery.start_soon(session)
            await entered.wait()
            scope.cancel(reason="the client left")
            await wait_all_tasks_blocked()
            assert not ended.is_set()
            calls, spy.before = spy.calls, None
            release.set()
            with trio.fail_after(10):
                await ended.wait()
        assert spy.calls <= calls + 2
        assert await answer(engine, PROMPTS[1]) == wanted[1]


async def test_f18_cancelling_everything_leaves_no_thread(tiny: str, spy: Spy) -> None:
    engine = MlxEngine(Settings(model=tiny))
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            await engine.load()
            warming = spy.calls

            def stop(_: Stepped) -> None:
                nursery.cancel_scope.cancel(reason="enough")

            nursery.start_soon(play, engine, script(PROMPTS[0], 10**6), stop)
    assert engine_threads() == []
    assert spy.calls - warming < 20


async def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    engine = MlxEngine(Settings(model=str(tmp_path)))
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        with pytest.raises(ModelUnusable, match=tmp_path.name):
            await engine.load()
        assert len(engine_threads()) == 1, "the thread is not to blame"
        nursery.cancel_scope.cancel()
    assert engine_threads() == []


async def test_a_model_that_cannot_be_loaded_ends_the_runtime(tmp_path: Path) -> None:
    with pytest.RaisesGroup(ModelUnusable, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await nursery.start(run_runtime, Settings(model=str(tmp_path), no_ssd=True))
    assert engine_threads() == []


# -- the whole runtime ---------------------------------------------------------------------------


@asynccontextmanager
async def running_runtime(tiny: str) -> AsyncIterator[Runtime]:
    async with trio.open_nursery() as nursery:
        runtime = await nursery.start(run_runtime, Settings(model=tiny, no_ssd=True))
        with trio.fail_after(60):
            yield runtime
            assert await runtime.drain(10)
    assert engine_threads() == []


def request(place: int, sampling: Sampling, tokens: int = TOKENS) -> Generate:
    prompt = TokenPrompt(tuple(PROMPTS[place]))
    return Generate(
        request_id=f"r{place}",
        prompt=prompt,
        sampling=sampling,
        max_tokens=tokens,
        ignore_eos=True,
        stop=(),
    )


async def tokens_of(runtime: Runtime, wish: Generate) -> list[int]:
    with await runtime.submit(wish) as heard:
        return [token async for delta in heard for token in delta.tokens]


SAMPLINGS = {
    "greedy": [Sampling(temperature=0)] * 8,
    "seeded": [
        Sampling(
            temperature=0.8,
            seed=seed,
            top_k=30 * (seed % 2),
            top_p=0.9 + 0.1 * (seed % 3 > 0),
            min_p=0.01,
        )
        for seed in range(8)
    ],
}


@pytest.mark.parametrize("kind", SAMPLINGS)
async def test_r1_concurrent_answers_are_what_each_is_alone(
    tiny: str, wanted: list[list[int]], kind: str
) -> None:
    wishes = [request(place, sampling) for place, sampling in enumerate(SAMPLINGS[kind])]
    async with running_runtime(tiny) as runtime:
        alone = [await tokens_of(runtime, wish) for wish in wishes]
        together: dict[int, list[int]] = {}

        async def one(place: int) -> None:
            together[place] = await tokens_of(runtime, wishes[place])

        async with trio.open_nursery() as nursery:
            for place in range(8):
                nursery.start_soon(one, place)
        assert [together[place] for place in range(8)] == alone
        assert runtime.model.batching == "batched"
    assert (alone == wanted) is (kind == "greedy")


UNDISTURBED: dict[str, list[list[int]]] = {}
"""What a model answers to the wishes of the test below, by its path: the same for each of its
errors."""


async def undisturbed_answers(tiny: str, wishes: Sequence[Generate]) -> list[list[int]]:
    if tiny not in UNDISTURBED:
        async with running_runtime(tiny) as runtime:
            UNDISTURBED[tiny] = [await tokens_of(runtime, wish) for wish in wishes]
    return UNDISTURBED[tiny]


@pytest.mark.parametrize("error", [Broken, Panic, NoMemory, MemoryError])
@pytest.mark.long(but=("Panic", "NoMemory"))
async def test_after_a_crash_each_answer_goes_on_with_its_next_token(
    tiny: str, spy: Spy, error: type[BaseException]
) -> None:
    """Greedy and seeded rows, in the middle of their answers; on the same thread."""
    samplings = [*SAMPLINGS["greedy"][:4], *SAMPLINGS["seeded"][4:]]
    wishes = [request(place, sampling, 60) for place, sampling in enumerate(samplings)]
    undisturbed = await undisturbed_answers(tiny, wishes)
    started, answered = list[int](), dict[int, list[int]]()
    spy.threads.clear()
    async with running_runtime(tiny) as runtime:

        async def one(place: int) -> None:
            with await runtime.submit(wishes[place]) as heard:
                tokens = list(cast(Delta, await heard.next()).tokens)
                started.append(place)
                if len(started) == 8:
                    spy.raise_after(3, error)
                tokens += [token async for delta in heard for token in delta.tokens]
            answered[place] = tokens

        async with trio.open_nursery() as nursery:
            for place in range(8):
                nursery.start_soon(one, place)
        health = runtime.health()
        assert health.status == "ok"
        facts = health.scheduler
        assert (facts.active_sequences, facts.requests_errored, facts.requests_completed) == (
            0,
            0,
            8,
        )
        assert (facts.recovery.crashes, facts.recovery.resumed) == (1, 8)
        assert facts.recovery.allocation_failures == (error in (NoMemory, MemoryError)), (
            "then nobody is to blame"
        )
        assert bool(facts.recovery.bound_bytes) == (error in (NoMemory, MemoryError))
        assert [actor.restarts for actor in health.actors] == [0, 1, 0, 0]
    assert len(spy.threads) == 1, "the same thread, before and after"
    model = build("llama")
    for place, (sampling, whole) in enumerate(zip(samplings, undisturbed, strict=True)):
        assert len(answered[place]) == len(whole)
        arithmetic.assert_tokens(model, PROMPTS[place], sampling, answered[place], whole, place)
