"""A disk that says nothing, and a writer that crashes: what waits for them is computed instead, and
nobody waits for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.bench import Opened, generate
from tests.fakes import FakeEngine
from trouper import Settings
from trouper.actors.graph import run_graph
from trouper.actors.runtime.model_manager import UNLOAD_S
from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.worker_threads import LAST_WORK_S, DiskThread
from trouper.actors.scheduling.disk_tier import ANSWER_S, PAUSE_S
from trouper.actors.ssd_writer import write_to_disk
from trouper.protocol.requests import TokenPrompt
from trouper.protocol.setting_fields import ByteSize

T = TypeVar("T")
TEXTS = 6
"""Texts that were written to the disk."""


class OddThread(DiskThread):
    """Does its work at once, but before a file is read it awaits `reading`."""

    def __init__(self, reading: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint) -> None:
        super().__init__()
        self.reading, self.reads = reading, 0

    async def run(self, work: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        if isinstance(work, partial) and work.func.__name__ == "read":
            self.reads += 1
            await self.reading()
        return work()


@asynccontextmanager
async def serving(directory: Path, thread: OddThread) -> AsyncIterator[Runtime]:
    """The graph around a fake engine, its cache directory in this thread."""
    settings = Settings(
        ssd_cache_dir=directory, ssd_keep_free=ByteSize(0), gather_ms=0, block_size=4
    )
    async with trio.open_nursery() as nursery:
        writer = partial(write_to_disk, thread=thread)
        runtime: Runtime = await nursery.start(
            partial(run_graph, settings, FakeEngine(), disk_writer=writer)
        )
        yield runtime
        await runtime.drain(400)


async def answered(runtime: Runtime, text: int) -> int:
    """Number of tokens that came from the cache."""
    with await runtime.submit(
        generate(prompt=TokenPrompt((1 + text,) * 41), max_tokens=2)
    ) as answer:
        async for _ in answer:
            pass
        return answer.cached_tokens


async def _blocks(runtime: Runtime, count: int) -> None:
    """Wait until so many blocks lie on the disk."""
    while runtime.health().directory.blocks < count:  # noqa: ASYNC110  Virtual time.
        await trio.sleep(1)


async def written(directory: Path) -> None:
    """All texts lie on the disk, and are in no memory."""
    async with serving(directory, OddThread()) as runtime:
        for text in range(TEXTS):
            await answered(runtime, text)
        await _blocks(runtime, 10 * TEXTS)


async def test_a_disk_that_says_nothing_costs_time_and_no_request(
    opened: Opened, tmp_path: Path, autojump_clock: MockClock
) -> None:
    await written(tmp_path)

    async def hang() -> None:
        thread.reading = trio.lowlevel.checkpoint
        await trio.sleep(PAUSE_S - 1)

    thread = OddThread(hang)
    async with serving(tmp_path, thread) as runtime:
        began = trio.current_time()
        async with trio.open_nursery() as both:
            both.start_soon(answered, runtime, 0)
            both.start_soon(answered, runtime, 1)
        assert ANSWER_S <= trio.current_time() - began < ANSWER_S + 1
        assert await answered(runtime, 2) == 0 and trio.current_time() - began < ANSWER_S + 1, (
            "it is not asked"
        )
        await trio.sleep(began + PAUSE_S - trio.current_time())
        assert await answered(runtime, 3) > 0, "it has answered, and is asked again"


async def test_a_disk_that_never_answers_is_asked_again_after_a_pause(
    opened: Opened, tmp_path: Path, autojump_clock: MockClock
) -> None:
    await written(tmp_path)
    async with serving(tmp_path, OddThread(partial(trio.sleep, 300))) as runtime:
        await answered(runtime, 0)
        await trio.sleep(PAUSE_S + 1)
        began = trio.current_time()
        await answered(runtime, 1)
        assert ANSWER_S <= trio.current_time() - began < ANSWER_S + 1


async def test_nobody_waits_for_what_a_crash_of_the_writer_forgot(
    opened: Opened, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Until it has crashed too often: then there is no disk."""
    await written(tmp_path)

    async def crash() -> None:
        raise RuntimeError("can't start new thread")

    thread = OddThread(crash)
    async with serving(tmp_path, thread) as runtime:
        for text in range(4):
            began = trio.current_time()
            assert await answered(runtime, text) == 0
            assert trio.current_time() - began < 5
        health = runtime.health()
        assert health.actors[3].state == "degraded" and not health.directory.attached
        assert "crashed too often: RuntimeError: can't start new thread" in health.directory.reason
        thread.reading = trio.lowlevel.checkpoint
        assert await answered(runtime, 4) == 0 and thread.reads == 4


async def test_after_a_crash_the_writer_reads_and_writes_again(
    opened: Opened, tmp_path: Path, autojump_clock: MockClock
) -> None:
    await written(tmp_path)

    async def crash() -> None:
        thread.reading = trio.lowlevel.checkpoint
        raise RuntimeError("can't start new thread")

    thread = OddThread(crash)
    async with serving(tmp_path, thread) as runtime:
        assert await answered(runtime, 0) == 0
        assert await answered(runtime, 1) > 0
        blocks = runtime.health().directory.blocks
        await answered(runtime, 100)
        await _blocks(runtime, blocks + 10)


class HungThread(OddThread):
    """The real thread hangs in each read until the test is over."""

    def __init__(self) -> None:
        super().__init__()
        self.over = Event()

    async def run(self, work: Callable[[], T]) -> T:
        if isinstance(work, partial) and work.func.__name__ == "read":
            self.reads += 1
            await DiskThread.run(self, self.over.wait)
        return await super().run(work)


async def test_a_model_is_unloaded_although_its_disk_hangs(
    opened: Opened, tmp_path: Path, autojump_clock: MockClock
) -> None:
    await written(tmp_path)
    thread = HungThread()
    try:
        async with serving(tmp_path, thread) as runtime:
            assert await answered(runtime, 0) == 0, "it was computed"
            began = trio.current_time()
            await runtime.drain(UNLOAD_S, leaving="unloaded")
            assert thread.reads == 1 and trio.current_time() - began < UNLOAD_S + LAST_WORK_S + 1
    finally:
        thread.over.set()


async def test_a_call_that_ends_is_waited_for_when_it_is_cancelled(mock_clock: MockClock) -> None:
    """A write is not left halfway. No time passes here but by a jump."""
    begun, may_end, states = trio.Event(), Event(), list[str]()

    def write() -> None:
        trio.from_thread.run_sync(begun.set)
        may_end.wait()
        states.append("written")

    async def save() -> None:
        try:
            await DiskThread().run(write)
        finally:
            states.append("left")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(save)
        await begun.wait()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
        may_end.set()
    assert states == ["written", "left"]


async def test_a_call_that_has_not_begun_is_not_waited_for(mock_clock: MockClock) -> None:
    thread, may_end = DiskThread(), Event()
    async with trio.open_nursery() as first:
        first.start_soon(thread.run, may_end.wait)
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as second:
            second.start_soon(thread.run, may_end.wait)
            await wait_all_tasks_blocked()
            second.cancel_scope.cancel()
        may_end.set()
