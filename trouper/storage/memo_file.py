"""Small JSON files that cache earlier results. A damaged file counts as empty, and a file that
cannot be written is left as it is."""

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
    """Read the values by name; empty if the file is missing or damaged, or if another user may
    have written it."""
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        if owner_or_writers(path):
            return {}
        return msgspec.json.decode(path.read_bytes(), type=dict[str, kind])  # type: ignore[valid-type]
    return {}


def write_memo(path: Path, known: Mapping[str, object]) -> None:
    """Replace the file as a whole. Raises nothing: values that cannot be written are only computed
    again."""
    with suppress(OSError):
        make_private(path.parent)
        temporary = write_temporary(path, msgspec.json.format(msgspec.json.encode(known)))
        try:
            temporary.replace(path)
        except OSError:
            temporary.unlink()
