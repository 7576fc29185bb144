"""Small JSON files that cache earlier results. A damaged file counts as empty, and a file that cannot be written is left as it is."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from trouper.storage.cache_directory import TEMPORARY_SUFFIX

T = TypeVar("T")


def read_memo(path: Path, kind: type[T]) -> dict[str, T]:
    """Read the values by name; empty if the file is missing or damaged."""
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=dict[str, kind])  # type: ignore[valid-type]
    return {}


def write_memo(path: Path, known: Mapping[str, object]) -> None:
    """Replace the file as a whole. Raises nothing: values that cannot be written are only computed again."""
    temporary = path.with_name(f"{path.name}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(known)))
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
