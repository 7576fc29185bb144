"""Results of self-checks, remembered in one small file of the cache directory."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec

from trouper.storage.memo_file import read_memo, write_memo

MAX_RESULTS = 200
"""Maximum number of remembered results. The oldest are removed."""


class CheckResult(msgspec.Struct, frozen=True):
    """Result of one self-check. off: features that are off, with the reason of each. checked: the
    models that were run. at: Unix seconds."""

    off: dict[str, str]
    checked: str
    seconds: float
    at: float


def recall(path: Path, key: str) -> CheckResult | None:
    """Find a result. None if there is none or the file is damaged: then the check runs again."""
    return read_memo(path, CheckResult).get(key)


def remember(path: Path, key: str, result: CheckResult) -> None:
    """Save a result. Raises nothing: a result that cannot be written only costs the next start a
    check."""
    others = {name: known for name, known in read_memo(path, CheckResult).items() if name != key}
    kept = dict(islice(others.items(), max(0, len(others) - MAX_RESULTS + 1), None)) | {key: result}
    write_memo(path, kept)
