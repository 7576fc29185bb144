"""What tests of the engine share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.arithmetic import skip_if_routed
from tests.families import save
from tests.family_configs import FAMILIES


@pytest.fixture(autouse=True)
def _arithmetic(request: pytest.FixtureRequest) -> None:
    """Tests of a family with experts are skipped, by name, where the device rounds to TF32."""
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if name in FAMILIES:
        skip_if_routed(FAMILIES[name])


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache directory in which nothing is remembered yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def target(tmp_path: Path) -> str:
    """The directory of a model for which another one drafts."""
    return str(save("llama", tmp_path / "target"))
