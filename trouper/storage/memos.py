"""Small JSON files of values that can be computed again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from trouper.protocol.private_files import make_private, owner_or_writers
from trouper.storage.cache_directory import write_temporary
from trouper.storage.file_operations import Disk, lock_within

T = TypeVar("T")
LOCK_PATIENCE_S = 5.0
"""A write under the lock takes milliseconds."""


def read_memo(path: Path, kind: type[T]) -> dict[str, T]:
    """Values by name; empty if missing, damaged, or writable by other users."""
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        if owner_or_writers(path):
            return {}
        values = dict[str, kind]  # type: ignore[valid-type]
        return msgspec.json.decode(path.read_bytes(), type=values)
    return {}


def add_to_memo(path: Path, kind: type[T], new: Mapping[str, T], keep: int) -> None:
    """Write values; of all, the last `keep` stay. Raises nothing: lost values are computed
    again."""
    with suppress(OSError):
        make_private(path.parent)
        # Ranks of one machine end their self-checks at the same moment.
        with _locked(path.parent):
            others = {key: one for key, one in read_memo(path, kind).items() if key not in new}
            values = dict([*others.items(), *new.items()][-keep:])
            temporary = write_temporary(path, msgspec.json.format(msgspec.json.encode(values)))
            try:
                temporary.replace(path)
            except OSError:
                temporary.unlink()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock, except beyond `LOCK_PATIENCE_S`: a stopped process may hold it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock_within(Disk(), descriptor, LOCK_PATIENCE_S)
        yield
    finally:
        os.close(descriptor)
