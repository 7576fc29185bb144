"""No test of an actor may end with an open reply channel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.actors.bench import Opened
from trouper.actors.runtime import runtime as runtime_module


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Every reply channel of the test, those that the runtime opens included."""
    all_opened = Opened()
    monkeypatch.setattr(runtime_module, "open_submission", all_opened.by_runtime)
    yield all_opened
    assert not all_opened.still_open()
