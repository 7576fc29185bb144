"""Fingerprints: digests of files by their content, and the namespace of a cache, a hash of
everything that determines its KV."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
from xxhash import xxh3_128

from trouper.protocol.paths import exists
from trouper.storage.memo_file import read_memo, write_memo

CHUNK_BYTES: Final = 1 << 20
YOUNG_S: Final = 3.0
"""Age below which a file's digest is not remembered. File systems' clocks have a resolution of up
to 2 s, so a file that changed just now may change again without a change of its times."""


class _State(msgspec.Struct, frozen=True):
    """File attributes, of which every change of the content changes one. The modification time can
    be set back by anybody (tools that unpack or copy do so), the time of the last change of the
    inode cannot."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class _Remembered(msgspec.Struct, frozen=True):
    state: _State
    digest: str


def namespace(parts: Mapping[str, str]) -> str:
    """Hash the parts to SHA-256 in hex. The order of `parts` does not matter; each name and each
    value does."""
    return sha256(
        json.dumps(dict(parts), sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def file_digest(path: Path, memo: Path | None, advance: Callable[[int], None] | None = None) -> str:
    """Return xxh3_128 of the content, in hex. Gigabytes of weights take seconds, so the file `memo`
    caches the digests.

    The hash detects accidents - another fine-tune, a broken download - at the speed of the disk. An
    attacker who can craft a collision controls the weights, and thereby the answers, anyway. Raises
    `OSError` if the file cannot be read; a memo that cannot be read or written only costs time.
    `advance` is called with the number of bytes read since the last call.
    """
    real = path.resolve(strict=True)
    before = _state(real)
    known = _recall(memo)
    found = known.get(str(real))
    if found is not None and found.state == before:
        return found.digest
    digest = _hash(real, advance)
    if (
        memo is not None
        and _state(real) == before
        and time.time() - before.ctime_ns / 1e9 > YOUNG_S
    ):
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
    """Read the memo; empty if it is damaged. (A damaged digest that still parses gives another
    namespace: a miss.)"""
    return {} if memo is None else read_memo(memo, _Remembered)


def _remember(memo: Path, known: dict[str, _Remembered]) -> None:
    write_memo(memo, {path: found for path, found in known.items() if exists(path)})
