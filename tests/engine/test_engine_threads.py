"""Threads of engines are kept for the next one, unless a job of theirs has crashed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.families import save
from trouper import ModelUnusable, Settings
from trouper.engine import host
from trouper.engine.host import IDLE, EngineThread, EngineThreads, MlxEngine


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineThreads]:
    """A pool of the test's own, whose threads end with it."""
    taken: list[EngineThread] = []

    class Noted(EngineThreads):
        def take(self, name: str) -> EngineThread:
            taken.append(super().take(name))
            return taken[-1]

    fresh = Noted()
    monkeypatch.setattr(host, "THREADS", fresh)
    yield fresh
    for thread in taken:
        thread.name = IDLE
        thread.end()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save("llama", tmp_path_factory.mktemp("tiny") / "llama"))


async def ident(model: str, work: Callable[[], object] = lambda: None) -> int:
    """Load a model, run a job of the engine, end the engine. Returns its thread."""
    engine, found = MlxEngine(Settings(model=model, self_check="off")), [0]
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await engine.load()
        found[0] = await engine._on_thread(threading.get_ident)
        with suppress(ZeroDivisionError):
            await engine._on_thread(work)
        nursery.cancel_scope.cancel()
    return found[0]


def alive(thread: int) -> bool:
    return any(each.ident == thread for each in threading.enumerate())


async def test_models_that_come_and_go_have_one_thread(threads: EngineThreads, model: str) -> None:
    assert len({await ident(model) for _ in range(4)}) == 1


async def test_engines_at_a_time_have_a_thread_each(threads: EngineThreads) -> None:
    first, second = threads.take("engine of a"), threads.take("engine of b")
    assert await first.run(threading.get_ident) != await second.run(threading.get_ident)
    names = {thread.name for thread in threading.enumerate()}
    assert {"engine of a", "engine of b"} <= names
    threads.give_back(first)
    assert threads.take("engine of c") is first and first.name == "engine of c"


async def test_a_thread_that_an_engine_crashed_on_ends(threads: EngineThreads, model: str) -> None:
    crashed = await ident(model, lambda: 1 / 0)
    assert await ident(model) != crashed
    while alive(crashed):  # noqa: ASYNC110 - threads end without an event
        await trio.sleep(0.001)


async def test_a_model_that_cannot_be_loaded_is_no_crash(
    threads: EngineThreads, model: str, tmp_path: Path
) -> None:
    engine = MlxEngine(Settings(model=str(tmp_path)))
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        thread = engine._thread
        with pytest.raises(ModelUnusable):
            await engine.load()
        nursery.cancel_scope.cancel()
    assert thread is not None and thread.name == IDLE and threads.take("engine of a") is thread


async def test_f18_a_thread_is_not_given_to_another_engine_while_it_works(
    threads: EngineThreads, model: str
) -> None:
    """A job that hangs keeps its thread: the next engine gets another one."""
    engine, hung = MlxEngine(Settings(model=model)), threading.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        nursery.start_soon(engine._on_thread, hung.wait)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
            other = threads.take("engine of b")
            assert await other.run(threading.get_ident)
        hung.set()
