"""What is written to disk comes back, in files that others can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import attrs
import pytest
from safetensors import safe_open

from tests.storage.making import (
    HUGE,
    NAMESPACE,
    ROOT,
    CountingDisk,
    Failing,
    all_runs,
    chain,
    how_it_reads,
    names,
    path_of,
    piece,
    put,
    read_all,
    same,
    wanted,
    write_run,
)
from trouper.protocol.blocks import BlockRef, Tensor
from trouper.storage import cache_directory, cache_inspection, run_reading
from trouper.storage.file_operations import Disk
from trouper.storage.runs import RunStore


def test_a_run_comes_back(store: RunStore) -> None:
    run, pieces = put(store)
    assert same(store.read(run.name, wanted(pieces)), pieces)
    assert run.parent == ROOT
    assert [(info.key, info.tokens) for info in run.blocks] == [
        (one.key, one.tokens) for one in pieces
    ]
    assert [(info.payload_bytes, info.snapshot_bytes) for info in run.blocks] == [
        (64, None),
        (64, 20),
        (64, None),
    ]
    assert store.verify(run.name) == run


def test_pieces_come_in_the_order_in_which_they_are_wanted_and_only_what_is_wanted(
    store: RunStore,
) -> None:
    run, pieces = put(store, 5)
    got = store.read(run.name, wanted(pieces, [3, 0, 4]))
    assert same(got, [pieces[3], pieces[0], pieces[4]])
    bare = store.read(run.name, [BlockRef(pieces[1].key, pieces[1].tokens)])
    assert same(bare, [attrs.evolve(pieces[1], snapshot=None)])
    state = store.read(
        run.name, [BlockRef(pieces[1].key, pieces[1].tokens, payload=False, snapshot=True)]
    )
    assert same(state, [attrs.evolve(pieces[1], payload=())])


def test_empty_parts_are_told_from_missing_ones(store: RunStore) -> None:
    """A payload of tensors without elements, a snapshot without tensors, a piece that is a snapshot
    only."""
    first = attrs.evolve(
        piece(ROOT, b"abcd"), payload=(Tensor("BF16", (2, 0, 3), b""),), snapshot=()
    )
    second = piece(first.key, b"efgh", payload=False, snapshot=True)
    run = write_run(store, ROOT, [first, second])
    assert same(store.read(run.name, [BlockRef(first.key, b"abcd", snapshot=True)]), [first])
    assert same(store.read(run.name, wanted([first, second], [1])), [second])
    assert [(info.payload_bytes, info.snapshot_bytes) for info in run.blocks] == [(0, 0), (0, 20)]
    assert all_runs(RunStore(store.directory, NAMESPACE)) == [run]


def test_views_of_other_formats_are_written_as_they_lie_in_memory(store: RunStore) -> None:
    numbers = memoryview(bytes(range(24))).cast("B", (2, 3, 4)).cast("B").cast("H", (3, 4))
    odd = attrs.evolve(piece(ROOT, b"abcd"), payload=(Tensor("U16", (3, 4), numbers),))
    run = write_run(store, ROOT, [odd])
    assert bytes(read_all(store, run)[0].payload[0].data) == bytes(range(24))


def test_tensors_that_do_not_fill_their_shape_are_a_bug(store: RunStore) -> None:
    for tensor in (Tensor("F32", (2,), b"1234"), Tensor("F7", (4,), b"1234")):
        with pytest.raises(ValueError):
            write_run(store, ROOT, [attrs.evolve(piece(ROOT, b"abcd"), payload=(tensor,))])


def test_more_tensors_than_one_system_call_takes(store: RunStore) -> None:
    many = tuple(Tensor("U8", (3,), place.to_bytes(3, "little")) for place in range(3000))
    big = attrs.evolve(piece(ROOT, b"abcd"), payload=many)
    assert same(read_all(store, write_run(store, ROOT, [big])), [big])


def test_the_file_is_what_the_safetensors_library_reads(store: RunStore) -> None:
    run, pieces = put(store)
    with safe_open(path_of(store, run), "numpy") as opened:
        assert sorted(opened.keys()) == [
            "b0.0",
            "b0.1",
            "b1.0",
            "b1.1",
            "b2.0",
            "b2.1",
            "s1.0",
            "s1.1",
        ]
        assert opened.metadata()["namespace"] == NAMESPACE
        assert opened.get_slice("b1.0").get_dtype() == "BF16"
        assert opened.get_slice("b1.0").get_shape() == [2, 4, 3]
        assert opened.get_tensor("b2.1").tobytes() == pieces[2].payload[1].data
        assert opened.get_tensor("s1.0").tobytes() == (pieces[1].snapshot or ())[0].data
    assert int.from_bytes(path_of(store, run).read_bytes()[:8], "little") % 8 == 0


def test_only_its_owner_reads_it(store: RunStore) -> None:
    run, _ = put(store)
    assert stat.S_IMODE(path_of(store, run).stat().st_mode) == 0o600
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o700


def test_neighbours_are_read_at_once_and_others_not_at_all(store: RunStore) -> None:
    run, pieces = put(store, 20)
    disk = CountingDisk()
    reader = RunStore(store.directory, NAMESPACE, disk)
    reader.read(run.name, [*wanted(pieces, [9]), BlockRef(pieces[8].key, pieces[8].tokens)])
    front = 2
    assert disk.preads == front + 2, "two payloads together, and a snapshot"
    before = disk.read_bytes
    reader.read(run.name, [])
    header_bytes = disk.read_bytes - before
    assert before - header_bytes == 64 + 64 + 20


def test_no_read_is_much_longer_than_its_bound(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Payloads of 64 bytes: three reach the bound of a read."""
    monkeypatch.setattr(run_reading, "READ_BYTES", 150)
    run, pieces = put(store, 20)
    disk = CountingDisk()
    refs = [BlockRef(piece.key, piece.tokens) for piece in pieces]
    found = RunStore(store.directory, NAMESPACE, disk).read(run.name, refs)
    assert same(found, [attrs.evolve(piece, snapshot=None) for piece in pieces])
    front = 2
    assert disk.preads == front + 7


@pytest.mark.parametrize("operation", ["create", "writev", "close", "rename"])
def test_a_write_that_fails_leaves_nothing(store: RunStore, operation: str) -> None:
    run, _ = put(store, seed=1)
    failing = RunStore(store.directory, NAMESPACE, Failing(operation))
    with pytest.raises(OSError, match="No space"):
        put(failing, seed=2)
    assert names(store) == [run.name]
    assert failing.total_bytes == run.file_bytes


def test_a_disk_that_takes_nothing_more_is_an_error_and_one_that_takes_little_is_not(
    store: RunStore,
) -> None:
    class Slow(Disk):
        most = 5

        def writev(self, fd: int, buffers: object) -> int:
            assert isinstance(buffers, list)
            return os.write(fd, buffers[0][: self.most]) if self.most else 0

    disk = Slow()
    slow = RunStore(store.directory, NAMESPACE, disk)
    run, pieces = put(slow)
    assert how_it_reads(store, run, pieces) == "right"
    disk.most = 0
    with pytest.raises(OSError, match="nothing more"):
        put(slow, seed=1)
    assert names(store) == [run.name]


def test_an_unremovable_temporary_file_does_not_hide_the_error(store: RunStore) -> None:
    disk = Failing("unlink")
    disk.rename = Failing("rename").rename  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space"):
        put(RunStore(store.directory, NAMESPACE, disk))
    (left,) = store.path.iterdir()
    os.utime(left, (0, 0))
    assert cache_directory.sweep(store.directory, HUGE).swept_files == 1


class Little(Disk):
    """Reads at most seven bytes at a time."""

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        return super().pread(fd, min(count, 7), offset)


def test_a_disk_that_gives_little_at_a_time_is_asked_again(store: RunStore) -> None:
    run, pieces = put(store)
    assert how_it_reads(RunStore(store.directory, NAMESPACE, Little()), run, pieces) == "right"


def test_the_same_run_is_written_once(store: RunStore) -> None:
    run, pieces = put(store)
    path = path_of(store, run)
    os.utime(path, (0, 0))
    inode = path.stat().st_ino
    other = RunStore(store.directory, NAMESPACE)
    for again in (other, store, other):
        assert put(again)[0] == run
        assert path.stat().st_ino == inode
    assert path.stat().st_mtime > 0, "it was of use"
    assert store.total_bytes == other.total_bytes == run.file_bytes
    path.write_bytes(b"torn")
    put(store)
    assert how_it_reads(store, run, pieces) == "right", "half a run is no run"


def test_the_same_blocks_with_other_parts_are_another_file(store: RunStore) -> None:
    blocks = write_run(store, ROOT, chain(2, snapshot_every=9))
    snapshots = write_run(store, ROOT, chain(2, snapshot_every=1, payload=False))
    both = write_run(store, ROOT, chain(2, snapshot_every=1))
    assert len({blocks.name, snapshots.name, both.name}) == 3
    assert len(all_runs(RunStore(store.directory, NAMESPACE))) == 3


class ClearedDisk(Disk):
    """`trouper cache clear` is called just before an operation, once."""

    def __init__(self, directory: Path, moment: str) -> None:
        self.directory, self.moment = directory, moment

    def _reach(self, operation: str) -> None:
        if operation == self.moment:
            self.moment = ""
            cache_inspection.clear(self.directory)

    def create(self, path: Path, nbytes: int) -> int:
        self._reach("create")
        return super().create(path, nbytes)

    def rename(self, source: Path, target: Path) -> None:
        self._reach("rename")
        super().rename(source, target)


@pytest.mark.parametrize("moment", ["create", "rename"])
def test_a_directory_may_be_cleared_while_it_is_written_to(store: RunStore, moment: str) -> None:
    disk = ClearedDisk(store.directory, moment)
    server = RunStore(store.directory, NAMESPACE, disk)
    run, _ = put(server)
    assert disk.moment == "" and all_runs(store) == [run]
