"""Servers that share a sick disk, against a model that knows every byte that was ever written.

Two stores of one namespace and one of another do random things in one directory, on disks that
fail, while files are also damaged at rest. Whatever is served is compared with what it must be; now
and then everything is opened again by a healthy disk, which must find every file that is still what
was written, and be able to keep the bound.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from random import Random
from shutil import rmtree

from tests.storage.faults import Crashed, FaultyDisk, damage
from tests.storage.making import NAMESPACE, OTHER_NAMESPACE, all_runs, piece, raw
from trouper.protocol.blocks import BlockData, BlockRef
from trouper.storage import cache_directory
from trouper.storage.cache_directory import TEMPORARY_SUFFIX, DiskLimits
from trouper.storage.run_format import SUFFIX, Sealed
from trouper.storage.runs import RunStore
from trouper.storage.stored_blocks import Damaged, RunInfo

MAX_BYTES = 16_000
"""A dozen runs."""
FLOOR_BYTES = 1000
STEPS = 150
SETTLE_EVERY = 50
RATE = 0.03
DAMAGE_RATE = 0.15
WEEK_S = 7 * 86400.0


class World:
    """`run` raises `AssertionError` if something is wrong."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.random, self.directory = Random(seed), directory
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.written: dict[Path, bytes] = {}
        self.sealed: dict[str, list[Sealed]] = {NAMESPACE: [], OTHER_NAMESPACE: []}
        cache_directory.prepare(directory)
        self.servers = [
            self._server(namespace) for namespace in (NAMESPACE, NAMESPACE, OTHER_NAMESPACE)
        ]
        self.counted = True
        """Whether somebody has listed the directory since its files were changed by nobody of them:
        then the bound holds."""

    def _server(self, namespace: str) -> RunStore:
        return RunStore(self.directory, namespace, FaultyDisk(self.random, RATE))

    def run(self) -> None:
        for step in range(STEPS):
            number = self.random.randrange(3)
            self._step(number)
            if self.random.random() < DAMAGE_RATE and (what := damage(self.random, self.directory)):
                self.faults[what] += 1
                self.counted = False
            if step % SETTLE_EVERY == SETTLE_EVERY - 1:
                for namespace in (NAMESPACE, OTHER_NAMESPACE):
                    self._settle(namespace)
        self._sweep()
        for number in range(3):
            self.faults += disk_of(self.servers[number]).injected

    def _step(self, number: int) -> None:
        store = self.servers[number]
        actions = (
            self._write,
            self._read,
            self._remove,
            self._touch,
            self._look,
            self._verify,
            self._poll,
        )
        action = self.random.choices(actions, (8, 8, 1, 2, 2, 2, 4))[0]
        temporary, unlinks = self._temporary(), unlink_faults(store)
        try:
            action(number, store)
        except OSError:
            self.counts["operations refused"] += 1
            assert self._temporary() <= temporary or unlink_faults(store) > unlinks, (
                "a temporary file is left"
            )
        except Crashed:
            self.counts["crashes"] += 1
            self._restart(number)

    def _restart(self, number: int) -> None:
        self.faults += disk_of(self.servers[number]).injected
        self.servers[number] = self._server(self.servers[number].namespace)

    # -- what a server does ----------------------------------------------------------------------

    def _write(self, number: int, store: RunStore) -> None:
        if self.random.random() < 0.4:
            self._refresh(number, store)
        known = self.sealed[store.namespace]
        again = known and self.random.random() < 0.2
        sealed = self.random.choice(known) if again else self._new(store)
        there = (store.path / sealed.info.name).exists()
        before = self._runs()
        room = store.put(sealed, DiskLimits(MAX_BYTES, FLOOR_BYTES))
        self.counts["evicted"] += len(before - self._runs())
        if not room.fits:
            self.counts["no room"] += 1
            return
        self.counts["written"] += 1
        # Else nothing was written, and nothing evicted that damage may have added.
        if self.counted and not there:
            self.counts["bounds checked"] += 1
            assert self._bytes() <= MAX_BYTES, "the directory is too large"

    def _new(self, store: RunStore) -> Sealed:
        known = self.sealed[store.namespace]
        parent = store.namespace.encode()
        if known and self.random.random() < 0.7:
            parent = self.random.choice(self.random.choice(known).info.blocks).key
        first, pieces = parent, list[BlockData]()
        for _ in range(self.random.randint(1, 5)):
            payload = self.random.random() < 0.9
            tokens = self.random.randbytes(4 * self.random.randint(1, 8))
            snapshot = not payload or self.random.random() < 0.3
            pieces.append(truth(store, parent, tokens, payload=payload, snapshot=snapshot))
            parent = pieces[-1].key
        sealed = store.seal(first, pieces)
        known.append(sealed)
        self.written[store.path / sealed.info.name] = b"".join(sealed.buffers)
        return sealed

    def _read(self, _: int, store: RunStore) -> None:
        if (run := self._any(store)) is None:
            return
        places = self.random.sample(range(len(run.blocks)), self.random.randint(1, len(run.blocks)))
        self._serve(store, run, [self._wanted(run, place) for place in places])

    def _wanted(self, run: RunInfo, place: int) -> BlockRef:
        info = run.blocks[place]
        snapshot = info.snapshot_bytes is not None and self.random.random() < 0.7
        return BlockRef(info.key, info.tokens, self.random.random() < 0.8, snapshot)

    def _serve(self, store: RunStore, run: RunInfo, wanted: list[BlockRef]) -> bool:
        """Whether the run was there, undamaged."""
        try:
            pieces = store.read(run.name, wanted)
        except Damaged as damaged:
            self.counts[f"damaged: {damaged.reason}"] += 1
            store.remove(run.name)
            return False
        for want, got in zip(wanted, pieces, strict=True):
            self._compare(store, run, want, got)
        self.counts["pieces served"] += len(pieces)
        return True

    def _compare(self, store: RunStore, run: RunInfo, want: BlockRef, got: BlockData) -> None:
        index = [info.key for info in run.blocks].index(want.key)
        info = run.blocks[index]
        parent = run.blocks[index - 1].key if index else run.parent
        payload = want.payload and bool(info.payload_bytes)
        expected = truth(store, parent, want.tokens, payload=payload, snapshot=want.snapshot)
        assert (
            (got.key, got.tokens) == (expected.key, expected.tokens) == (want.key, want.tokens)
        ), "wrong piece"
        assert raw(got.payload) == raw(expected.payload), "wrong bytes"
        assert raw(got.snapshot) == raw(expected.snapshot), "wrong bytes in a snapshot"

    def _remove(self, _: int, store: RunStore) -> None:
        if (run := self._any(store)) is not None:
            store.remove(run.name)

    def _touch(self, _: int, store: RunStore) -> None:
        store.touch({run.name for run in (self._any(store), self._any(store)) if run is not None})

    def _look(self, number: int, store: RunStore) -> None:
        if self.random.random() < 0.5:
            self._restart(number)
        self._refresh(number, self.servers[number])

    def _refresh(self, number: int, store: RunStore) -> None:
        before = disk_of(store).injected.total()
        store.refresh()
        self.counted |= disk_of(store).injected.total() == before

    def _poll(self, _: int, store: RunStore) -> None:
        changes = store.poll()
        self.counts["appeared in polls"] += len(changes.appeared)
        names = {run.name for run in store.runs}
        assert {run.name for run in changes.appeared} <= names
        assert not {run.name for run in changes.vanished} & names

    def _verify(self, _: int, store: RunStore) -> None:
        if (run := self._any(store)) is not None:
            try:
                store.verify(run.name)
            except Damaged:
                store.remove(run.name)

    def _any(self, store: RunStore) -> RunInfo | None:
        runs = list(store.runs)
        return self.random.choice(runs) if runs else None

    # -- what a healthy disk finds ---------------------------------------------------------------

    def _settle(self, namespace: str) -> None:
        store = RunStore(self.directory, namespace)
        whole = {
            path.name
            for path in store.path.glob(f"*{SUFFIX}")
            if self.written.get(path) == path.read_bytes()
        }
        found = {run.name: run for run in all_runs(store)}
        assert whole <= found.keys(), "a sound run was lost"
        for run in found.values():
            every = [
                BlockRef(info.key, info.tokens, snapshot=info.snapshot_bytes is not None)
                for info in run.blocks
            ]
            assert self._serve(store, run, every) or run.name not in whole, (
                "a sound run is called damaged"
            )
        assert store.make_room(0, MAX_BYTES).fits, "the directory is too large"
        assert self._bytes() <= MAX_BYTES, "the directory is too large"
        assert sum(path.stat().st_size for path in self._runs()) == store.total_bytes
        self.counts["reopened"] += 1

    def _sweep(self) -> None:
        for path in self._temporary():
            os.utime(path, (0, 0))
        cache_directory.prepare(self.directory)
        cache_directory.sweep(self.directory, WEEK_S)
        assert not self._temporary(), "temporary files outlive a sweep"

    def _runs(self) -> set[Path]:
        return set(self.directory.glob(f"*/*{SUFFIX}"))

    def _temporary(self) -> set[Path]:
        return set(self.directory.glob(f"*/*{TEMPORARY_SUFFIX}"))

    def _bytes(self) -> int:
        return sum(path.stat().st_size for path in self.directory.glob("*/*"))


def truth(
    store: RunStore, parent: bytes, tokens: bytes, *, payload: bool, snapshot: bool
) -> BlockData:
    """The same text has other bytes in another namespace."""
    return piece(parent, tokens, payload=payload, snapshot=snapshot, salt=store.namespace.encode())


def disk_of(store: RunStore) -> FaultyDisk:
    assert isinstance(store._disk, FaultyDisk)
    return store._disk


def unlink_faults(store: RunStore) -> int:
    return sum(
        count for what, count in disk_of(store).injected.items() if what.startswith("unlink")
    )


def campaign(
    faults: int, directory: Path, first: int = 0
) -> tuple[Counter[str], Counter[str], int]:
    """Worlds from seed `first` on, until so many faults were injected: the faults, what happened,
    and the next seed. An error's note says which seed it was."""
    injected, counts, seed = Counter[str](), Counter[str](), first
    while injected.total() < faults:
        world = World(seed, directory / str(seed))
        try:
            world.run()
        except BaseException as error:
            error.add_note(f"again: python -m tests.storage 1 {seed}")
            raise
        injected += world.faults
        counts += world.counts
        rmtree(world.directory)
        seed += 1
    return injected, counts, seed
