"""Small JSON files of values that can be computed again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from trouper.protocol.private_files import make_private, owner_or_writers
from trouper.storage.cache_directory import write_temporary

T = TypeVar("T")


def read_memo(path: Path, kind: type[T]) -> dict[str, T]:
    """Values by name; empty if missing, damaged, or writable by other users."""
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        if owner_or_writers(path):
            return {}
        values = dict[str, kind]  # type: ignore[valid-type]
        return msgspec.json.decode(path.read_bytes(), type=values)
    return {}


def write_memo(path: Path, known: Mapping[str, object]) -> None:
    """Replace the whole file. Raises nothing: lost values are computed again."""
    with suppress(OSError):
        make_private(path.parent)
        temporary = write_temporary(path, msgspec.json.format(msgspec.json.encode(known)))
        try:
            temporary.replace(path)
        except OSError:
            temporary.unlink()
