"""The directory stays within its bound and the disk above its floor; what was of use last stays
longest."""

from __future__ import annotations

from pathlib import Path

from tests.storage.making import HUGE, NAMESPACE, OTHER_NAMESPACE, Failing, aged, all_runs, put
from trouper.storage.file_operations import Disk
from trouper.storage.runs import RunStore


def test_the_least_recently_used_goes_first(store: RunStore) -> None:
    runs = aged(store, 4)
    size = runs[0].file_bytes
    store.touch([runs[0].name, "never-there.safetensors"])
    room = store.make_room(size, 4 * size)
    assert (room.fits, [run.name for run in room.removed]) == (True, [runs[1].name])
    assert store.total_bytes == 3 * size
    assert store.make_room(size, 4 * size).removed == ()
    assert {run.name for run in all_runs(RunStore(store.directory, NAMESPACE))} == {
        run.name for run in (runs[0], runs[2], runs[3])
    }


def test_what_can_never_fit_costs_nobody_anything(store: RunStore) -> None:
    runs = aged(store, 3)
    room = store.make_room(1000, 999)
    assert (room.fits, room.removed) == (False, ())
    assert len(all_runs(store)) == len(runs)


def test_the_use_by_another_server_counts(store: RunStore) -> None:
    runs = aged(store, 3)
    RunStore(store.directory, NAMESPACE).touch([runs[0].name])
    room = store.make_room(0, 2 * runs[0].file_bytes)
    assert [run.name for run in room.removed] == [runs[1].name]


def test_other_namespaces_share_the_bound(store: RunStore) -> None:
    other = RunStore(store.directory, OTHER_NAMESPACE)
    (theirs,) = aged(other, 1)
    run, _ = put(store, seed=1)
    store.refresh()
    assert store.total_bytes == theirs.file_bytes + run.file_bytes
    room = store.make_room(0, run.file_bytes)
    assert (room.fits, room.removed) == (True, ())
    changes = other.refresh()
    assert (changes.appeared, changes.vanished) == ((), (theirs,))


def test_what_cannot_be_removed_stays_and_is_said(store: RunStore) -> None:
    runs = aged(store, 2)
    stuck = RunStore(store.directory, NAMESPACE, Failing("unlink"))
    stuck.refresh()
    room = stuck.make_room(1, runs[0].file_bytes)
    assert (room.fits, room.removed, len(all_runs(stuck))) == (False, (), 2)


def test_a_full_disk_is_worse_than_an_empty_cache(store: RunStore) -> None:
    class Full(Disk):
        free = 0

        def free_bytes(self, directory: Path) -> int:
            return self.free

    runs = aged(store, 4)
    size = runs[0].file_bytes
    disk = Full()
    full = RunStore(store.directory, NAMESPACE, disk)
    full.refresh()
    disk.free = 10 * size
    assert full.make_room(size, HUGE, floor_bytes=9 * size).removed == ()
    disk.free = 9 * size
    assert [run.name for run in full.make_room(size, HUGE, floor_bytes=9 * size).removed] == [
        runs[0].name
    ]
    disk.free = 0
    room = full.make_room(size, HUGE, floor_bytes=9 * size)
    assert (room.fits, len(room.removed), full.total_bytes) == (False, 3, 0)
