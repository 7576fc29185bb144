"""Every family's model, saved once; a home for what the runtime remembers of files and of
self-checks, which each model then has once, not once a test."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.arithmetic import skip_if_routed
from tests.family_configs import FAMILIES
from tests.reuse.serving import Tiny


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    directory = tmp_path_factory.mktemp("families")
    return cache(lambda name: Tiny.saved(name, directory))


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def home(shared_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_home))


@pytest.fixture
def tiny(name: str, tiny_of: Callable[[str], Tiny]) -> Tiny:
    """The model that the test is parametrized with."""
    skip_if_routed(FAMILIES[name])
    return tiny_of(name)
