"""Runs are found again after a restart, and in a directory that others use, too."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.storage.making import (
    NAMESPACE,
    ROOT,
    CountingDisk,
    Failing,
    aged,
    all_runs,
    chain,
    how_it_reads,
    names,
    path_of,
    put,
    same,
    wanted,
    write_run,
)
from trouper.storage import cache_directory, run_reading
from trouper.storage.file_operations import Disk
from trouper.storage.runs import RunStore


def test_only_unknown_files_are_opened(store: RunStore) -> None:
    runs = [put(store, seed=seed)[0] for seed in range(10)]
    disk = CountingDisk()
    again = RunStore(store.directory, NAMESPACE, disk)
    assert sorted(all_runs(again), key=lambda run: run.name) == sorted(
        runs, key=lambda run: run.name
    )
    assert len(disk.opened) == 10
    assert again.total_bytes == sum(run.file_bytes for run in runs)
    late, _ = put(store, seed=11)
    again.refresh()
    assert disk.opened[10:] == [late.name]


def test_f10_reading_rewrites_no_index(store: RunStore) -> None:
    """Only a run's own time changes, by which unused files are known."""
    run, pieces = put(store)

    def files() -> dict[Path, tuple[int, bytes]]:
        return {path: (path.stat().st_ino, path.read_bytes()) for path in store.path.iterdir()}

    before = files()
    for _ in range(3):
        assert same(store.read(run.name, wanted(pieces)), pieces)
        store.touch([run.name])
    assert files() == before and len(before) == 1


def test_a_file_that_has_changed_is_opened_again(store: RunStore) -> None:
    kept, _ = put(store, seed=1)
    replaced, _ = put(store, seed=2)
    path_of(store, replaced).write_bytes(b"torn")
    assert store.refresh().vanished == (replaced,)
    assert list(store.runs) == [kept]
    assert store.damaged == {"torn": 1}
    assert not path_of(store, replaced).exists()


def test_what_a_run_continues_comes_before_it(store: RunStore) -> None:
    """Also in a branch from its middle, and whatever the names sort like."""
    trunk = chain(4, seed=5)
    runs = [write_run(store, ROOT, trunk)]
    for place in range(4):
        parent = trunk[place].key
        branch = chain(2, parent=parent, seed=place)
        runs.append(write_run(store, parent, branch))
        runs.append(write_run(store, branch[-1].key, chain(1, parent=branch[-1].key)))
    orphan = write_run(store, b"o" * 32, chain(1, parent=b"o" * 32))
    found = all_runs(RunStore(store.directory, NAMESPACE))
    assert len(found) == len(runs) + 1
    assert orphan in found
    known = {ROOT, b"o" * 32}
    for run in found:
        assert run.parent in known
        known |= {info.key for info in run.blocks}


def test_damaged_and_foreign_files_are_counted_and_removed_and_nothing_else_is(
    store: RunStore,
) -> None:
    torn, _ = put(store, seed=1)
    flipped, _ = put(store, seed=2)
    kept, _ = put(store, seed=3)
    path_of(store, torn).write_bytes(path_of(store, torn).read_bytes()[:-1])
    data = path_of(store, flipped).read_bytes()
    path_of(store, flipped).write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    (store.path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    ours = ["notes.txt", "other.tmp", "directory.safetensors/file"]
    for name in ours:
        (store.path / name).parent.mkdir(exist_ok=True)
        (store.path / name).touch()
    beside = store.directory / "precious.safetensors"
    beside.touch()
    (store.directory / "models").mkdir()
    (store.directory / "models" / "precious.safetensors").touch()
    again = RunStore(store.directory, NAMESPACE)
    assert all_runs(again) == [kept]
    assert again.damaged == {"torn": 1, "checksum": 1, "foreign": 1}
    assert names(store) == sorted([kept.name, *(Path(name).parts[0] for name in ours)])
    assert beside.exists() and (store.directory / "models" / "precious.safetensors").exists()
    assert again.total_bytes == kept.file_bytes


def test_an_empty_or_a_missing_namespace_holds_nothing(store: RunStore) -> None:
    assert all_runs(store) == []
    shutil.rmtree(store.directory)
    with pytest.raises(FileNotFoundError):
        all_runs(store)
    with pytest.raises(FileNotFoundError):
        put(store)
    cache_directory.prepare(store.directory)
    assert all_runs(store) == []


@pytest.mark.parametrize("namespace", ["", "../../../../etc", "A" * 64, "0" * 31])
def test_a_namespace_is_hex_digits(cache: Path, namespace: str) -> None:
    with pytest.raises(ValueError):
        RunStore(cache, namespace)


def test_each_server_finds_what_the_other_did(store: RunStore) -> None:
    other = RunStore(store.directory, NAMESPACE)
    run, pieces = put(store)
    changes = other.refresh()
    assert (changes.appeared, changes.vanished) == ((run,), ())
    assert how_it_reads(other, run, pieces) == "right"
    other.remove(run.name)
    assert how_it_reads(store, run, pieces) == "vanished"
    assert store.make_room(10, 10).fits, "what is gone takes no room"
    changes = store.refresh()
    assert (changes.appeared, changes.vanished) == ((), (run,))
    put(other)
    put(store)
    assert how_it_reads(other, run, pieces) == "right"


def test_a_poll_finds_what_the_other_did_by_names_alone(store: RunStore) -> None:
    disk = CountingDisk()
    other = RunStore(store.directory, NAMESPACE, disk)
    other.refresh()
    run, pieces = put(store)
    changes = other.poll()
    assert (changes.appeared, changes.vanished) == ((run,), ())
    assert how_it_reads(other, run, pieces) == "right"
    assert other.total_bytes == run.file_bytes, "it may be evicted"
    again, _ = put(store, seed=1)
    disk.opened.clear()
    assert other.poll().appeared == (again,)
    assert disk.opened == [again.name], "what is known is not opened again"
    store.remove(run.name)
    changes = other.poll()
    assert (changes.appeared, changes.vanished) == ((), (run,))
    shutil.rmtree(other.path)
    assert other.poll().vanished == (again,)


@pytest.mark.parametrize("damage", ["half", "other bytes", "a temporary file", "unreadable"])
def test_a_poll_believes_no_damaged_file(damage: str, store: RunStore) -> None:
    run, _ = put(store)
    other = RunStore(store.directory, NAMESPACE)
    path = path_of(store, run)
    data = path.read_bytes()
    if damage == "half":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "other bytes":
        path.write_bytes(data[:40] + b"?" + data[41:])
    elif damage == "a temporary file":
        path.rename(path.with_name(f"{path.stem}-0123.tmp"))
    else:
        other = RunStore(store.directory, NAMESPACE, Failing("open"))
    assert other.poll().appeared == ()
    assert other.poll().appeared == ()
    assert other.unreadable == (damage == "unreadable"), "once until the next refresh"
    assert path.exists() == (damage == "unreadable")
    half_written = [*path.parent.glob("*.tmp")]
    assert len(half_written) == (damage == "a temporary file"), "another server may write it"


def test_a_read_outlives_a_removal_in_its_midst(store: RunStore) -> None:
    run, pieces = put(store)
    with run_reading.open_run(Disk(), path_of(store, run), NAMESPACE) as opened:
        store.remove(run.name)
        assert same(opened.blocks(wanted(pieces)), pieces)


def test_a_sweep_takes_runs_away_and_the_next_look_says_so(store: RunStore) -> None:
    runs = aged(store, 3)
    os.utime(path_of(store, runs[0]), (0, 0))
    assert cache_directory.sweep(store.directory, 86400.0).swept_files == 1
    assert store.refresh().vanished == (runs[0],)


def test_a_disk_that_reads_nothing_loses_nothing(store: RunStore) -> None:
    run, _ = put(store)
    sick = RunStore(store.directory, NAMESPACE, Failing("pread"))
    assert all_runs(sick) == []
    assert sick.unreadable == 1
    with pytest.raises(OSError):
        sick.read(run.name, [])
    assert all_runs(store) == [run]
