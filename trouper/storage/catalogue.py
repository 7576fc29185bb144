"""Catalogue of a namespace's runs in one file, which spares a start from opening every run. Loss is
harmless."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs
import msgspec
from xxhash import xxh3_128_digest

from trouper.storage.stored_blocks import RunInfo

NAME: Final = "catalogue.msgpack"
CHECKSUM_BYTES: Final = 16
VERSION: Final = 1


@attrs.frozen
class _Catalogue:
    version: int
    namespace: str
    runs: list[RunInfo]


def encode(namespace: str, runs: Iterable[RunInfo]) -> tuple[bytes, bytes]:
    """Encode checksum and body."""
    body = msgspec.msgpack.encode(_Catalogue(VERSION, namespace, list(runs)))
    return xxh3_128_digest(body), body


def decode(namespace: str | None, data: bytes) -> list[RunInfo]:
    """Decode the file; empty if damaged or of another namespace. `namespace` None: any."""
    checksum, body = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
    if xxh3_128_digest(body) != checksum:
        return []
    try:
        found = msgspec.msgpack.decode(body, type=_Catalogue)
    except msgspec.MsgspecError:
        return []
    return found.runs if found.version == VERSION and namespace in (None, found.namespace) else []
