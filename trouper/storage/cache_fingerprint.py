"""What a cache was computed with, as a name: files by their content, and everything that shapes KV together."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
from xxhash import xxh3_128

from trouper.storage.memo_file import read_memo, write_memo

CHUNK_BYTES: Final = 1 << 20
YOUNG_S: Final = 3.0
"""Clocks of file systems tick in up to 2 s: a file that changed just now may change again without its times changing."""


class _State(msgspec.Struct, frozen=True):
    """No change of a file's content leaves all of these as they were. The modification time can be set back by anybody
    (and is, by tools that unpack or copy), the time of the last change of the inode cannot."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class _Remembered(msgspec.Struct, frozen=True):
    state: _State
    digest: str


def namespace(parts: Mapping[str, str]) -> str:
    """SHA-256 in hex. The order of `parts` does not matter; each name and each value does."""
    return sha256(json.dumps(dict(parts), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_digest(path: Path, memo: Path | None, advance: Callable[[int], None] | None = None) -> str:
    """xxh3_128 of the content, in hex; gigabytes of weights take seconds, so `memo` is a file that remembers it.

    It tells accidents apart - another fine-tune, a broken download - at the speed of the disk. Who can craft a collision
    owns the weights, and thereby the answers, anyway. Raises `OSError` if the file cannot be read; a memo that cannot be
    read or written only costs time. `advance` hears how many more bytes were read.
    """
    real = path.resolve(strict=True)
    before = _state(real)
    known = _recall(memo)
    found = known.get(str(real))
    if found is not None and found.state == before:
        return found.digest
    digest = _hash(real, advance)
    if memo is not None and _state(real) == before and time.time() - before.ctime_ns / 1e9 > YOUNG_S:
        _remember(memo, {**_recall(memo), str(real): _Remembered(before, digest)})
    return digest


def _state(path: Path) -> _State:
    stat = path.stat()
    return _State(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def _hash(path: Path, advance: Callable[[int], None] | None) -> str:
    digest, buffer = xxh3_128(), bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            if advance is not None:
                advance(count)
    return digest.hexdigest()


def _recall(memo: Path | None) -> dict[str, _Remembered]:
    """Nothing, if it is damaged. (A wrong digest that still reads as one makes a namespace of its own: a miss.)"""
    return {} if memo is None else read_memo(memo, _Remembered)


def _remember(memo: Path, known: dict[str, _Remembered]) -> None:
    write_memo(memo, {path: found for path, found in known.items() if Path(path).exists()})
