"""A cache directory, and the runs of one namespace in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.making import NAMESPACE
from trouper.storage import cache_directory
from trouper.storage.runs import RunStore


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    cache_directory.prepare(path)
    return path


@pytest.fixture
def store(cache: Path) -> RunStore:
    return RunStore(cache, NAMESPACE)
