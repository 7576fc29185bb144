"""SSDWriter alone: real files, but each piece of work takes a second of virtual time."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.storage.making import NAMESPACE, ROOT, chain, piece, same
from trouper import Settings
from trouper.actors.runtime.disk_orders import WriterEdges
from trouper.actors.runtime.worker_threads import DiskThread
from trouper.actors.ssd_writer import REST, write_to_disk
from trouper.protocol.blocks import BlockData, BlockRef
from trouper.protocol.health import DirectoryStats, SchedulerStats
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.watch import Watch
from trouper.protocol.work import (
    Announce,
    Catalogue,
    DiskNews,
    DiskOrder,
    Inspect,
    Loaded,
    Read,
    RemovedFromDisk,
    Sweep,
    Write,
    Written,
)
from trouper.storage.file_operations import Disk
from trouper.storage.store_upkeep import HOUR_S, INSPECTED_AT_ONCE

T = TypeVar("T")
WORK_S = 1.0
WEEK_S = 7 * 86400.0
A, B, C = (chain(2, seed=seed) for seed in range(3))


@pytest.fixture
def autojump_clock() -> MockClock:
    return MockClock(autojump_threshold=0)


@attrs.define(eq=False)
class Bench:
    """The writer's surroundings."""

    path: Path
    orders: trio.MemorySendChannel[DiskOrder]
    heard: trio.MemoryReceiveChannel[DiskNews]
    stats: Watch[DirectoryStats]
    scheduler: Watch[SchedulerStats]

    async def tell(self, *orders: DiskOrder) -> list[DiskNews]:
        """All that comes of these, in order."""
        for order in orders:
            self.orders.send_nowait(order)
        await trio.sleep(100)
        return self.news()

    def news(self) -> list[DiskNews]:
        found = list[DiskNews]()
        while True:
            try:
                found.append(self.heard.receive_nowait())
            except trio.WouldBlock:
                return found

    def files(self) -> list[Path]:
        return sorted(self.path.rglob("*.safetensors"))


class SlowThread(DiskThread):
    """Each piece of work takes a second of virtual time."""

    async def run(self, work: Callable[[], T]) -> T:
        await trio.sleep(WORK_S)
        return work()


class OpenedFiles(Disk):
    """The real disk, with a list of the files that were opened."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def open(self, path: Path) -> int:
        self.names.append(path.name)
        return super().open(path)


@asynccontextmanager
async def writing(
    path: Path,
    *,
    disk: Disk | None = None,
    reads_in_parts: bool = False,
    poll_every_s: float = inf,
    **more: Any,
) -> AsyncIterator[Bench]:
    """Over once the body is and what was ordered has been carried out."""
    orders, taken = trio.open_memory_channel[DiskOrder](100)
    news, heard = trio.open_memory_channel[DiskNews](100)
    bench = Bench(path, orders, heard, Watch(DirectoryStats()), Watch(SchedulerStats()))
    with news, heard, taken:
        edges = WriterEdges(
            taken, news, bench.stats, bench.scheduler, reads_in_parts=reads_in_parts
        )
        async with trio.open_nursery() as nursery:
            with orders:
                writer = partial(
                    write_to_disk, disk=disk, thread=SlowThread(), poll_every_s=poll_every_s
                )
                nursery.start_soon(writer, edges, path, NAMESPACE, Settings(**more))
                yield bench


def write(pieces: list[BlockData], parent: bytes = ROOT) -> Write:
    return Write(parent, tuple(pieces))


def read(ticket: int, pieces: list[BlockData], *, snapshots: bool = False) -> Read:
    named = (BlockRef(one.key, one.tokens, bool(one.payload), snapshots) for one in pieces)
    return Read(ticket, tuple(named))


def keys(pieces: list[BlockData]) -> tuple[bytes, ...]:
    return tuple(one.key for one in pieces)


def said(news: list[DiskNews]) -> list[object]:
    """Something that can be compared, whatever time it took."""
    return [(one.ticket, keys([*one.blocks])) if isinstance(one, Loaded) else one for one in news]


def nothing(ticket: int) -> object:
    return (ticket, ())


async def test_who_waits_for_a_read_goes_before_all_writes(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with writing(tmp_path) as bench:
        await bench.tell(Announce(), write(A))
        told = await bench.tell(write(B), Inspect(), write(C), read(7, A))
        assert [type(one) for one in told] == [Loaded, Written, Written]
        assert isinstance(told[0], Loaded) and same(
            told[0].blocks, [attrs.evolve(one, snapshot=None) for one in A]
        )


async def test_the_blocks_of_each_file_come_as_soon_as_they_are_read(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The reading of a file takes a second here. The last file is damaged: the answer ends without
    it."""
    plain = [attrs.evolve(one, snapshot=None) for one in (*A, *B, *C)]
    runs = plain[:2], plain[2:4], plain[4:]
    async with writing(tmp_path, reads_in_parts=True) as bench:
        await bench.tell(Announce(), *map(write, runs))
        for spoilt in (None, runs[2]):
            if spoilt is not None:
                path = next(path for path in bench.files() if spoilt[0].key.hex()[:16] in path.name)
                path.write_bytes(path.read_bytes()[:-1] + b"?")
            await trio.sleep(100)
            began, came = trio.current_time(), list[tuple[float, tuple[bytes, ...], bool]]()
            bench.orders.send_nowait(read(1, plain))
            while not came or not came[-1][2]:
                news = await bench.heard.receive()
                if isinstance(news, Loaded):
                    came.append(
                        (round(trio.current_time() - began, 6), keys([*news.blocks]), news.complete)
                    )
            whole = [one for one in runs if one is not spoilt]
            parts = [(WORK_S * (number + 1), keys(run), False) for number, run in enumerate(whole)]
            assert came[:-1] == parts
            assert came[-1][1:] == ((), True)
        assert bench.stats.latest.read_bytes == sum(one.nbytes for one in (*plain, *plain[:4]))


@pytest.mark.parametrize("rows", [0, 3])
async def test_writes_rest_while_rows_decode_and_nothing_else_does(
    rows: int, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with writing(tmp_path) as bench:
        await bench.tell(Announce())
        bench.scheduler.publish(SchedulerStats(active_sequences=rows))
        began = trio.current_time()
        for order in (write(A), write(B)):
            bench.orders.send_nowait(order)
        assert isinstance(await bench.heard.receive(), Written)
        wrote = trio.current_time() - began
        bench.orders.send_nowait(read(1, A))
        if rows:
            assert isinstance(await bench.heard.receive(), Loaded)
            assert trio.current_time() - began < wrote + 3 * WORK_S
        written = [one async for one in take(bench, 1 if rows else 2) if isinstance(one, Written)]
        assert len(written) == 1
        rested = trio.current_time() - began - wrote
        assert rested >= REST * wrote if rows else rested < 4 * WORK_S
        bench.orders.send_nowait(write(C))
        ending = trio.current_time()
    assert trio.current_time() - ending < 5 * WORK_S, "at the end nobody rests"


async def take(bench: Bench, count: int) -> AsyncIterator[DiskNews]:
    for _ in range(count):
        yield await bench.heard.receive()


async def test_a_disk_has_only_so_many_writes_an_hour(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    size = write(A).nbytes
    async with writing(tmp_path, ssd_write_budget=ByteSize(size)) as bench:
        await bench.tell(Announce())
        told = await bench.tell(write(A), write(B))
        assert told == [Written(keys(A), size), Written(keys(B), size, refused=True)]
        assert bench.stats.latest.shed_writes == 1
        await trio.sleep(HOUR_S)
        assert await bench.tell(write(B)) == [Written(keys(B), size)]
        assert len(bench.files()) == 2


async def test_a_damaged_file_is_a_miss_and_gone(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with writing(tmp_path) as bench:
        plain = [attrs.evolve(one, snapshot=None) for one in A]
        await bench.tell(Announce(), write(plain), write(B))
        spoilt = next(path for path in bench.files() if A[0].key.hex()[:16] in path.name)
        spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"?")
        told = await bench.tell(read(1, A, snapshots=False), read(2, B))
        assert RemovedFromDisk(keys(A)) in told
        loaded = [one for one in told if isinstance(one, Loaded)]
        assert [(one.ticket, keys([*one.blocks])) for one in loaded] == [(1, ()), (2, keys(B))]
        assert not spoilt.exists() and len(bench.files()) == 1
        assert bench.stats.latest.damaged == 1
        assert said(await bench.tell(read(3, A))) == [nothing(3)]


async def test_each_file_that_was_read_is_counted(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    plain = [attrs.evolve(one, snapshot=None) for one in (*A, *B)]
    async with writing(tmp_path) as bench:
        await bench.tell(Announce(), write(plain[:2]), write(plain[2:]))
        await bench.tell(read(1, plain))
        assert bench.stats.latest.read_files == 2
        spoilt = next(path for path in bench.files() if A[0].key.hex()[:16] in path.name)
        spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"?")
        await bench.tell(read(2, plain))
        assert bench.stats.latest.read_files == 2, "the order ends with the damaged file"


async def test_damaged_files_are_counted_once_and_vanished_ones_are_none(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Another server may remove files of a shared directory. A sweep counts from the store's own
    count."""
    async with writing(tmp_path) as bench:
        plain = [attrs.evolve(one, snapshot=None) for one in A]
        await bench.tell(Announce(), write(plain), write(B))
        there, gone = sorted(bench.files(), key=lambda path: A[0].key.hex()[:16] not in path.name)
        there.write_bytes(there.read_bytes()[:-1] + b"?")
        gone.unlink()
        told = await bench.tell(read(1, A), read(2, B))
        assert {keys(A), keys(B)} == {one.keys for one in told if isinstance(one, RemovedFromDisk)}
        assert bench.stats.latest.damaged == 1
        await bench.tell(Sweep(WEEK_S))
        assert bench.stats.latest.damaged == 1


async def test_each_server_of_a_directory_soon_knows_what_the_other_did(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with writing(tmp_path) as one, writing(tmp_path, poll_every_s=10) as other:
        await one.tell(Announce(), write(A))
        assert await other.tell(Announce()) != []
        assert await other.tell() == [], "nothing has changed"
        await one.tell(write(B))
        news = await other.tell()
        assert [run.blocks[0].key for heard in news for run in getattr(heard, "runs", ())] == [
            B[0].key
        ]
        plain = [attrs.evolve(piece, snapshot=None) for piece in B]
        [loaded] = await other.tell(read(1, plain))
        assert isinstance(loaded, Loaded) and same(loaded.blocks, plain)
        for path in one.files():
            path.unlink()
        gone = {key for heard in await other.tell() for key in getattr(heard, "keys", ())}
        assert gone == {*keys(A), *keys(B)}
        assert other.stats.latest.damaged == 0


async def test_what_lies_in_two_files_is_lost_with_the_last(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The second has one block again, with a snapshot: there it is whole."""
    first = [attrs.evolve(one, snapshot=None) for one in A]
    whole = [attrs.evolve(A[1], snapshot=piece(ROOT, b"", payload=False, snapshot=True).snapshot)]
    for files in ([write(first), write(whole, A[0].key)], [write(whole, A[0].key), write(first)]):
        path = tmp_path / str(len(files[0].blocks))
        async with writing(path) as bench:
            await bench.tell(Announce(), *files)
            [loaded] = await bench.tell(read(1, whole, snapshots=True))
            assert isinstance(loaded, Loaded) and same(loaded.blocks, whole)
            next(one for one in bench.files() if A[0].key.hex()[:16] in one.name).unlink()
            assert RemovedFromDisk(keys(A[:1])) in await bench.tell(Sweep(WEEK_S))
            assert [
                one.nbytes for one in await bench.tell(read(2, whole)) if isinstance(one, Loaded)
            ] != [0]


async def test_a_snapshot_that_is_nowhere_costs_no_file(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    plain = [attrs.evolve(one, snapshot=None) for one in A]
    async with writing(tmp_path) as bench:
        await bench.tell(Announce(), write(plain))
        assert said(await bench.tell(read(1, plain, snapshots=True))) == [nothing(1)]
        assert len(bench.files()) == 1


async def test_a_sick_disk_answers_at_once_and_is_tried_again_with_the_next_sweep(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "blocks"
    path.write_text("a file where the directory should be")
    async with writing(path) as bench:
        refused = [nothing(1), Written(keys(A), write(A).nbytes, refused=True)]
        assert await bench.tell(Announce()) == [Catalogue(())]
        assert said(await bench.tell(read(1, A), write(A))) == refused
        path.unlink()
        assert said(await bench.tell(read(1, A), write(A))) == refused, "requests do not try it"
        attached = [bench.stats.latest.attached]
        assert bench.stats.latest.reason == "Not a directory", "once, whatever the orders are"
        assert not path.exists()
        assert Catalogue((), complete=True) in await bench.tell(Sweep(WEEK_S))
        assert [*attached, bench.stats.latest.attached] == [False, True]
        assert await bench.tell(write(A)) == [Written(keys(A), write(A).nbytes)]


async def test_what_is_read_is_of_use(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with writing(tmp_path) as bench:
        await bench.tell(Announce(), write(A), write(B))
        for path in bench.files():
            os.utime(path, (0, 10**9))
        await bench.tell(read(1, A))
        used = {path.name[:16]: path.stat().st_mtime for path in bench.files()}
        assert used[A[0].key.hex()[:16]] > used[B[0].key.hex()[:16]] == 10**9


async def test_each_file_is_inspected_in_its_turn(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    many = [chain(1, seed=seed) for seed in range(2 * INSPECTED_AT_ONCE - 1)]
    async with writing(tmp_path) as bench:
        await bench.tell(Announce(), *map(write, many))
        for path in bench.files():
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        told = await bench.tell(Inspect(), Inspect())
        await wait_all_tasks_blocked()
        assert {key for one in told if isinstance(one, RemovedFromDisk) for key in one.keys} == {
            one[0].key for one in many
        }
        assert not bench.files()
        assert bench.stats.latest.inspected == len(many)


async def test_one_round_of_inspections_reads_each_file_once(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    many = [chain(1, seed=seed) for seed in range(INSPECTED_AT_ONCE + 1)]
    opened = OpenedFiles()
    async with writing(tmp_path, disk=opened) as bench:
        await bench.tell(Announce(), *map(write, many))
        opened.names.clear()
        await bench.tell(Inspect(), Inspect())
    assert sorted(opened.names) == [path.name for path in bench.files()]
