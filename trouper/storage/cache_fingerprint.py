"""Digests of files, and the namespace of a cache: a hash of everything that determines KV."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
from xxhash import xxh3_128

from trouper.storage.memos import add_to_memo, read_memo

CHUNK_BYTES: Final = 1 << 20
# Digests of younger files are not remembered: file systems' clocks have up to 2 s resolution, hence
# a change may leave the times alone.
YOUNG_S: Final = 3.0
MAX_REMEMBERED: Final = 10_000


class _State(msgspec.Struct, frozen=True):
    # Attributes of which every change of content changes one: tools set the modification time back,
    # but never the inode's change time.

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class _Remembered(msgspec.Struct, frozen=True):
    state: _State
    digest: str


def namespace(parts: Mapping[str, str]) -> str:
    """SHA-256 in hex of names and values, in any order."""
    return sha256(
        json.dumps(dict(parts), sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def file_digest(path: Path, memo: Path | None, advance: Callable[[int], None] | None = None) -> str:
    """xxh3_128 of the content, in hex. `memo` caches digests, since weights take seconds. `advance`
    gets the bytes read since the last call. Raises `OSError` if the file cannot be read."""
    # This hash detects accidents at disk speed; an attacker with a collision controls the weights
    # anyway.
    real = path.resolve(strict=True)
    before = _state(real)
    # A damaged digest only gives another namespace.
    found = None if memo is None else read_memo(memo, _Remembered).get(str(real))
    if found is not None and found.state == before:
        return found.digest
    digest = _hash(real, advance)
    if (
        memo is not None
        and _state(real) == before
        and time.time() - before.ctime_ns / 1e9 > YOUNG_S
    ):
        add_to_memo(memo, _Remembered, {str(real): _Remembered(before, digest)}, MAX_REMEMBERED)
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
