"""Chains of pieces whose bytes follow from their keys, so that whatever is read can be compared
with what it must be."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from random import Random

from trouper.protocol.blocks import BlockData, BlockRef, Tensor, Tensors
from trouper.storage.file_operations import Disk
from trouper.storage.runs import RunStore
from trouper.storage.stored_blocks import Damaged, RunInfo, parents_first

ROOT = sha256(b"root").digest()
NAMESPACE = sha256(b"namespace").hexdigest()
OTHER_NAMESPACE = sha256(b"another").hexdigest()
HUGE = 2**40
Raw = tuple[tuple[str, tuple[int, ...], bytes], ...]


def piece(
    parent: bytes, tokens: bytes, *, payload: bool = True, snapshot: bool = False, salt: bytes = b""
) -> BlockData:
    """Of 16 bytes a token: a bfloat16 and a uint8 tensor, and if asked a float32 snapshot with an
    empty tensor in it. The same key has other bytes with another `salt`."""
    key = sha256(parent + tokens).digest()
    count = len(tokens) // 4
    kv = (
        Tensor("BF16", (2, count, 3), noise(key + salt, b"bf16", 12 * count)),
        Tensor("U8", (count, 4), noise(key + salt, b"u8", 4 * count)),
    )
    state = (Tensor("F32", (5,), noise(key + salt, b"state", 20)), Tensor("F16", (0, 7), b""))
    return BlockData(key, tokens, kv if payload else (), state if snapshot else None)


def noise(key: bytes, what: bytes, count: int) -> bytes:
    return Random(key + what).randbytes(count)


def chain(
    count: int,
    *,
    parent: bytes = ROOT,
    seed: int = 0,
    tokens: int = 4,
    payload: bool = True,
    snapshot_every: int = 2,
) -> list[BlockData]:
    random, pieces = Random(f"{parent.hex()} {seed}"), list[BlockData]()
    for place in range(count):
        before = pieces[-1].key if pieces else parent
        has_snapshot = place % snapshot_every == snapshot_every - 1
        pieces.append(
            piece(before, random.randbytes(4 * tokens), payload=payload, snapshot=has_snapshot)
        )
    return pieces


def wanted(pieces: Sequence[BlockData], places: Sequence[int] | None = None) -> list[BlockRef]:
    """All that there is of these pieces."""
    return [
        BlockRef(
            pieces[i].key, pieces[i].tokens, bool(pieces[i].payload), pieces[i].snapshot is not None
        )
        for i in (range(len(pieces)) if places is None else places)
    ]


def raw(payload: Tensors | None) -> Raw | None:
    """Something that can be compared."""
    return (
        None
        if payload is None
        else tuple((one.dtype, one.shape, bytes(one.data)) for one in payload)
    )


def same(got: Sequence[BlockData], expected: Sequence[BlockData]) -> bool:
    def content(piece: BlockData) -> object:
        return piece.key, piece.tokens, raw(piece.payload), raw(piece.snapshot)

    return list(map(content, got)) == list(map(content, expected))


def read_all(store: RunStore, run: RunInfo) -> list[BlockData]:
    parts = [
        BlockRef(info.key, info.tokens, snapshot=info.snapshot_bytes is not None)
        for info in run.blocks
    ]
    return store.read(run.name, parts)


def put(store: RunStore, count: int = 3, seed: int = 0) -> tuple[RunInfo, list[BlockData]]:
    pieces = chain(count, seed=seed)
    return write_run(store, ROOT, pieces), pieces


def path_of(store: RunStore, run: RunInfo) -> Path:
    return store.path / run.name


def how_it_reads(store: RunStore, run: RunInfo, pieces: list[BlockData]) -> str:
    """Either "right" or "wrong", or why the file is damaged."""
    try:
        return "right" if same(store.read(run.name, wanted(pieces)), pieces) else "wrong"
    except Damaged as damaged:
        return damaged.reason


def names(store: RunStore) -> list[str]:
    return sorted(path.name for path in store.path.iterdir())


def aged(store: RunStore, count: int) -> list[RunInfo]:
    """Runs of the same size, the first ones older."""
    runs = []
    for seed in range(count):
        run, _ = put(store, seed=seed)
        when = time.time() - 1000 + seed
        os.utime(path_of(store, run), (when, when))
        runs.append(run)
    store.refresh()
    return runs


class CountingDisk(Disk):
    """Knows which files were opened for reading, and how many bytes were read."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.read_bytes = 0
        self.preads = 0

    def open(self, path: Path) -> int:
        self.opened.append(path.name)
        return super().open(path)

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        data = super().pread(fd, count, offset)
        self.preads += 1
        self.read_bytes += len(data)
        return data


class Failing(Disk):
    """One operation fails."""

    def __init__(self, operation: str, after: int = 0) -> None:
        self.left = after
        setattr(self, operation, self._fail)

    def _fail(self, *_: object) -> int:
        raise OSError(28, "No space left on device")


def write_run(store: RunStore, parent: bytes, pieces: Sequence[BlockData]) -> RunInfo:
    sealed = store.seal(parent, pieces)
    assert store.put(sealed).fits
    return sealed.info


def all_runs(store: RunStore) -> list[RunInfo]:
    """The runs of the directory as it is now; parents come before the runs that continue them."""
    store.refresh()
    return parents_first(store.runs)
