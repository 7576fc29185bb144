"""Files of the cache directory that the disk does not read: each costs its own blocks, and only a
faulty disk the whole tier."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import attrs
import pytest
from trio.testing import MockClock

from tests.actors.test_writer import (
    A,
    B,
    Bench,
    C,
    autojump_clock,
    keys,
    nothing,
    read,
    said,
    write,
    writing,
)
from trouper.actors.ssd_writer import MAX_IN_A_ROW, UnreadableFiles
from trouper.protocol.work import (
    Announce,
    DiskNews,
    DiskOrder,
    Inspect,
    Loaded,
    RemovedFromDisk,
    Sweep,
    Written,
)
from trouper.storage import cache_directory
from trouper.storage.cache_directory import TEMPORARY_SUFFIX
from trouper.storage.file_operations import Disk

__all__ = ["autojump_clock"]
WEEK_S = 7 * 86400.0
PLAIN = [[attrs.evolve(one, snapshot=None) for one in run] for run in (A, B, C)]


class BadSectors(Disk):
    """The disk reads none of these files, and does not remove those that it keeps."""

    def __init__(self) -> None:
        self.bad: set[str] = set()
        self.keeps = self.touches = False
        self._open: dict[int, str] = {}
        self.error = errno.EIO

    def open(self, path: Path) -> int:
        fd = super().open(path)
        self._open[fd] = path.name
        return fd

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
        super().close(fd)

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        if self._open.get(fd) in self.bad:
            raise OSError(self.error, os.strerror(self.error))
        return super().pread(fd, count, offset)

    def unlink(self, path: Path) -> None:
        if self.keeps:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        super().unlink(path)

    def touch(self, path: Path) -> None:
        if self.touches:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        super().touch(path)


def name_of(bench: Bench, number: int) -> str:
    return next(path.name for path in bench.files() if PLAIN[number][0].key.hex()[:16] in path.name)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("order", [read(1, PLAIN[0]), Inspect()])
async def test_one_unreadable_file_costs_its_own_blocks_alone(
    order: DiskOrder, tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk = BadSectors()
    async with writing(tmp_path, disk=disk) as bench:
        await bench.tell(Announce(), *map(write, PLAIN))
        disk.bad.add(name := name_of(bench, 0))
        assert RemovedFromDisk(keys(PLAIN[0])) in await bench.tell(order)
        assert bench.stats.latest.attached
        assert said(await bench.tell(read(2, PLAIN[0]), read(3, PLAIN[1]))) == [
            nothing(2),
            (3, keys(PLAIN[1])),
        ]
        assert await bench.tell(Sweep(WEEK_S), Inspect()) == [], "a sweep does not find it again"
        assert len(bench.files()) == 3, "it stays: the disk may read it after a restart"
        assert [name in line for line in warnings(caplog)] == [True], "it is named, and once"
        again = Written(keys(PLAIN[0]), write(PLAIN[0]).nbytes)
        assert await bench.tell(write(PLAIN[0])) == [again]
        disk.bad.clear()  # What was written anew lies elsewhere on the disk.
        assert said(await bench.tell(read(4, PLAIN[0]))) == [(4, keys(PLAIN[0]))]
        assert await bench.tell(Sweep(WEEK_S)) == []
        disk.bad.add(name)
        assert nothing(5) in said(await bench.tell(read(5, PLAIN[0])))
        assert len(warnings(caplog)) == 1


async def test_what_is_written_again_replaces_an_unreadable_file(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    disk = BadSectors()
    async with writing(tmp_path, disk=disk) as bench:
        await bench.tell(Announce(), write(PLAIN[0]))
        [path] = bench.files()
        before = path.stat().st_ino
        with path.open("rb"):  # So that no other file gets its number.
            disk.bad.add(path.name)
            await bench.tell(read(1, PLAIN[0]), write(PLAIN[0]))
            assert path.stat().st_ino != before


async def test_a_disk_that_reads_file_after_file_not_is_detached(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk = BadSectors()
    async with writing(tmp_path, disk=disk) as bench:
        await bench.tell(Announce(), *map(write, PLAIN))
        disk.bad = {path.name for path in bench.files()}
        attached = []
        for number, run in enumerate(PLAIN):
            assert nothing(number) in said(await bench.tell(read(number, run)))
            attached.append(bench.stats.latest.attached)
        assert attached == [True] * MAX_IN_A_ROW + [False]
        assert bench.stats.latest.reason
        disk.bad.clear()
        await bench.tell(Sweep(WEEK_S))
        assert bench.stats.latest.attached
        assert said(await bench.tell(read(9, PLAIN[0]))) == [(9, keys(PLAIN[0]))], "found again"
        assert len(warnings(caplog)) == MAX_IN_A_ROW + 2


async def test_a_file_that_is_read_between_them_shows_that_the_disk_works(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    disk = BadSectors()
    async with writing(tmp_path, disk=disk) as bench:
        await bench.tell(Announce(), *map(write, PLAIN))
        for number in range(2):
            disk.bad.add(name_of(bench, number))
            await bench.tell(read(number, PLAIN[number]), read(9, PLAIN[2]))
        disk.bad.add(name_of(bench, 2))
        await bench.tell(read(3, PLAIN[2]))
        assert bench.stats.latest.attached


def test_what_any_file_would_have_is_the_disks_fault() -> None:
    with pytest.raises(OSError, match="x"):
        UnreadableFiles().note_or_raise("a", OSError(errno.EMFILE, "x"))


async def test_neither_a_damaged_file_that_stays_nor_a_use_that_is_not_noted_costs_the_tier(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """As in a directory that was mounted to be read only."""
    disk = BadSectors()
    async with writing(tmp_path, disk=disk) as bench:
        await bench.tell(Announce(), *map(write, PLAIN))
        path = next(path for path in bench.files() if path.name == name_of(bench, 0))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        disk.keeps = disk.touches = True
        told: list[DiskNews] = await bench.tell(read(1, PLAIN[0]), read(2, PLAIN[1]))
        assert RemovedFromDisk(keys(PLAIN[0])) in told
        assert said([one for one in told if isinstance(one, Loaded)]) == [
            nothing(1),
            (2, keys(PLAIN[1])),
        ]
        assert bench.stats.latest.attached
        assert await bench.tell(Sweep(WEEK_S)) == []
        disk.keeps = disk.touches = False


def test_a_file_that_cannot_be_removed_does_not_stop_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_directory.prepare(tmp_path / "blocks")
    for name in ("a", "b", "c"):
        (old := tmp_path / "blocks" / f"{name}{TEMPORARY_SUFFIX}").touch()
        os.utime(old, (0, 0))
    unlink = Path.unlink

    def kept(path: Path, *, missing_ok: bool = False) -> None:
        if path.name.startswith("b"):
            raise PermissionError(errno.EACCES, "not yours")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", kept)
    usage = cache_directory.sweep(tmp_path / "blocks", WEEK_S)
    assert (usage.swept_files, usage.files) == (2, 1)
