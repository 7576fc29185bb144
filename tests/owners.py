"""Files that belong to somebody else, and the worst umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the path belong to another user; root alone can do that, and anybody else becomes
    another user."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)


@contextmanager
def without_umask() -> Iterator[None]:
    """Let files have every mode that they are made with."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)
