"""Several writers of one directory keep one bound, at any moment: models of a server, servers, the
ranks of a group."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.storage.faults import Crashed
from tests.storage.making import NAMESPACE, OTHER_NAMESPACE, ROOT, chain
from trouper.storage import bounded_directory
from trouper.storage.bounded_directory import SIZE, SharedUsage
from trouper.storage.cache_directory import USAGE, DiskLimits
from trouper.storage.file_operations import Disk, File
from trouper.storage.runs import RunStore
from trouper.storage.store_upkeep import write_run

WEEK_S = 7 * 86400.0
SEALED = RunStore(Path(), NAMESPACE).seal(ROOT, chain(3)).info.file_bytes
"""Bytes of each run here."""
LIMITS = DiskLimits(max_bytes=8 * SEALED, keep_free_bytes=0)


def stored_bytes(directory: Path) -> int:
    """Bytes of all files of all namespaces, also of those that are being written."""
    total = 0
    for path in directory.glob("*/*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def measured_at_once(directory: Path) -> Iterator[int]:
    """While no file is created and none is evicted; nothing if it is never so."""
    with SharedUsage(Disk(), directory).locked() as usage:
        if usage is not None:
            yield stored_bytes(directory)


def write(store: RunStore, seed: int) -> bool:
    return write_run(store, ROOT, chain(3, seed=seed), LIMITS)[0] is not None


class Listings(Disk):
    """Counts how often the directory is listed."""

    listings = 0

    def files(self, directory: Path) -> list[File]:
        self.listings += 1
        return super().files(directory)


def test_none_of_several_writers_exceeds_the_bound_of_all(cache: Path) -> None:
    stores = [RunStore(cache, namespace) for namespace in (NAMESPACE, NAMESPACE, OTHER_NAMESPACE)]
    for store in stores:
        store.refresh()
    for seed in range(30):
        assert write(stores[seed % 3], seed)
        assert stored_bytes(cache) <= LIMITS.max_bytes
    assert stored_bytes(cache) > LIMITS.max_bytes - SEALED, "and it is used"


def test_no_write_lists_the_directory_unless_all_that_the_writer_knows_is_gone(cache: Path) -> None:
    disk = Listings()
    stores = [RunStore(cache, NAMESPACE, disk), RunStore(cache, OTHER_NAMESPACE, disk)]
    for store in stores:
        store.refresh()
    before = disk.listings
    for seed in range(100):
        assert write(stores[seed % 2], seed)
    assert disk.listings - before == 0
    late = RunStore(cache, NAMESPACE, disk)
    late.refresh()
    for seed in range(100, 120):
        assert write(stores[seed % 2], seed)
    before = disk.listings
    assert write(late, 120), "it knows no file that is there; so it looks"
    assert 0 < disk.listings - before <= 2
    assert stored_bytes(cache) <= LIMITS.max_bytes


def test_a_file_that_is_replaced_does_not_count(cache: Path) -> None:
    store = RunStore(cache, NAMESPACE)
    assert write(store, 0)
    [run] = store.runs
    store.skip(run.name)
    assert write(store, 0), "again, since the file could not be read"
    assert counted(cache) == stored_bytes(cache) == SEALED


WRITER = """
import sys
from pathlib import Path
from tests.storage.making import ROOT, chain
from tests.storage.test_shared_bound import LIMITS, RunStore, write_run
store = RunStore(Path(sys.argv[1]), sys.argv[2])
store.refresh()
print("ready", flush=True)
sys.stdin.readline()
first = int(sys.argv[3])
runs = (write_run(store, ROOT, chain(3, seed=seed), LIMITS) for seed in range(first, first + 60))
print(sum(run[0] is not None for run in runs))
"""


def test_at_no_moment_do_processes_and_threads_together_exceed_the_bound(cache: Path) -> None:
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", WRITER, str(cache), namespace, str(first)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for namespace, first in ((NAMESPACE, 1000), (OTHER_NAMESPACE, 2000))
        ]
        assert [writer.stdout and writer.stdout.readline() for writer in writers] == ["ready\n"] * 2
        written: list[int] = []
        threads = [
            threading.Thread(
                target=lambda first: written.append(_write_many(RunStore(cache, NAMESPACE), first)),
                args=(first,),
            )
            for first in (3000, 4000)
        ]
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        for thread in threads:
            thread.start()
        measured = list[int]()
        while any(writer.poll() is None for writer in writers) or any(
            thread.is_alive() for thread in threads
        ):
            measured += measured_at_once(cache)
        for thread in threads:
            thread.join()
        written += [int(writer.stdout.read()) for writer in writers if writer.stdout]
    assert sum(written) > 200, "hardly any of 240 is refused"
    assert LIMITS.max_bytes - SEALED < stored_bytes(cache) <= LIMITS.max_bytes
    assert len(measured) > 10
    assert max(measured) <= LIMITS.max_bytes


def _write_many(store: RunStore, first: int) -> int:
    return sum(write(store, seed) for seed in range(first, first + 60))


class Dies(Disk):
    """The process is killed at its first call of one operation; nothing cleans up."""

    def __init__(self, operation: str) -> None:
        self.operation, self.dead = operation, False

    def _perhaps(self, operation: str) -> None:
        self.dead |= operation == self.operation
        if self.dead:
            raise Crashed

    def create(self, path: Path, nbytes: int) -> int:
        self._perhaps("create")
        return super().create(path, nbytes)

    def rename(self, source: Path, target: Path) -> None:
        self._perhaps("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._perhaps("unlink")
        super().unlink(path)

    def open_shared(self, path: Path) -> int:
        self._perhaps("")
        return super().open_shared(path)


@pytest.mark.parametrize("operation", ["create", "rename"])
def test_what_a_killed_writer_had_reserved_is_free_after_the_next_listing(
    cache: Path, operation: str
) -> None:
    store = RunStore(cache, NAMESPACE)
    for seed in range(4):
        assert write(store, seed)
    for seed in range(10, 13):
        with pytest.raises(Crashed):
            write(RunStore(cache, NAMESPACE, Dies(operation)), seed)
    left = list(store.path.glob("*.tmp"))
    assert len(left) == (3 if operation == "rename" else 0)
    assert counted(cache) >= stored_bytes(cache), "never too low"
    for path in left:  # As a sweep does after an hour.
        path.unlink()
    store.refresh()
    assert counted(cache) == stored_bytes(cache) == 4 * SEALED
    for seed in range(4, 8):
        assert write(store, seed)
    assert stored_bytes(cache) == LIMITS.max_bytes


def counted(cache: Path) -> int:
    with SharedUsage(Disk(), cache).locked() as usage:
        assert usage is not None and usage.bytes is not None
        return usage.bytes


def test_temporary_files_of_killed_writers_count_while_they_exist(cache: Path) -> None:
    with pytest.raises(Crashed):
        write(RunStore(cache, NAMESPACE, Dies("rename")), 0)
    (left,) = cache.glob("*/*.tmp")
    assert left.stat().st_size == SEALED, "at once"
    store = RunStore(cache, NAMESPACE)
    for seed in range(20):
        assert write(store, seed)
        assert stored_bytes(cache) <= LIMITS.max_bytes


def test_a_writer_that_is_stopped_while_it_has_the_lock_costs_the_others_writes_and_nothing_else(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_directory, "LOCK_PATIENCE_S", 0.01)
    store = RunStore(cache, NAMESPACE)
    assert write(store, 0)
    with SharedUsage(Disk(), cache).locked() as usage:
        assert usage is not None
        assert not write(store, 1)
        assert [run.name for run in store.runs] == [
            run.name for run in RunStore(cache, NAMESPACE).refresh().appeared
        ]
        store.remove(next(iter(store.runs)).name)
    assert (stored_bytes(cache), counted(cache)) == (0, SEALED), "too high until the next listing"
    assert write(store, 1)
    store.refresh()
    assert counted(cache) == stored_bytes(cache) == SEALED


@pytest.mark.parametrize("damage", ["", "x" * SIZE, "1" * SIZE, "0"])
def test_a_count_that_is_damaged_is_counted_again(cache: Path, damage: str) -> None:
    store, other = RunStore(cache, NAMESPACE), RunStore(cache, OTHER_NAMESPACE)
    for seed in range(4):
        assert write(store, seed) and write(other, seed)
    assert len((cache / USAGE).read_bytes()) == SIZE
    (cache / USAGE).write_text(damage)
    assert write(store, 5)
    assert counted(cache) == stored_bytes(cache) == LIMITS.max_bytes


def test_a_count_that_cannot_be_written_stops_writing_but_not_evicting(cache: Path) -> None:
    class Full(Disk):
        def pwrite(self, fd: int, data: bytes, offset: int) -> None:
            raise OSError(28, "No space left on device")

    store = RunStore(cache, NAMESPACE)
    for seed in range(8):
        assert write(store, seed)
    full = RunStore(cache, NAMESPACE, Full())
    full.refresh()
    with pytest.raises(OSError, match="No space"):
        write(full, 9)
    assert stored_bytes(cache) == LIMITS.max_bytes - SEALED
    assert full.make_room(0, 6 * SEALED).fits
    assert stored_bytes(cache) <= 6 * SEALED
