"""Results of self-checks, remembered in one small file of the cache directory."""

from __future__ import annotations

import secrets
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec

from trouper.storage.directory import TEMPORARY_SUFFIX

MOST_RESULTS = 200
"""The oldest are forgotten."""


class CheckResult(msgspec.Struct, frozen=True):
    """off: features with the reason why each is off. checked: the models that were run. at: Unix seconds."""

    off: dict[str, str]
    checked: str
    seconds: float
    at: float


def recall(path: Path, key: str) -> CheckResult | None:
    """None also if the file is damaged: then the check runs again."""
    return _read(path).get(key)


def remember(path: Path, key: str, result: CheckResult) -> None:
    """Raises nothing: a result that cannot be written only costs the next start a check."""
    others = {each: known for each, known in _read(path).items() if each != key}
    kept = dict(islice(others.items(), max(0, len(others) - MOST_RESULTS + 1), None)) | {key: result}
    temporary = path.with_name(f"{path.name}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()


def _read(path: Path) -> dict[str, CheckResult]:
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=dict[str, CheckResult])
    return {}
