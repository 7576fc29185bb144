"""Results of self-checks, in one small file of the cache directory."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec

from trouper.storage.memo_file import read_memo, write_memo

# The oldest are removed.
MAX_RESULTS = 200


class CheckResult(msgspec.Struct, frozen=True):
    """off: reason by disabled feature. checked: the models that ran. at: Unix seconds."""

    off: dict[str, str]
    checked: str
    seconds: float
    at: float


def recall(path: Path, key: str) -> CheckResult | None:
    """Find a result; None if missing or damaged."""
    return read_memo(path, CheckResult).get(key)


def remember(path: Path, key: str, result: CheckResult) -> None:
    """Save a result. Raises nothing: a lost result only costs the next start a check."""
    others = {name: known for name, known in read_memo(path, CheckResult).items() if name != key}
    kept = dict(islice(others.items(), max(0, len(others) - MAX_RESULTS + 1), None)) | {key: result}
    write_memo(path, kept)
