"""Every family's model, saved once; a home for what the runtime remembers of files."""

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


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def tiny(name: str, tiny_of: Callable[[str], Tiny]) -> Tiny:
    """The model that the test is parametrized with."""
    skip_if_routed(FAMILIES[name])
    return tiny_of(name)
