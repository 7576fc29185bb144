"""The example that embeds the runtime, with the fake engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import embed
from tests.actors.bench import Opened
from tests.fakes import FakeEngine


async def test_the_example_streams_an_answer_and_ends(
    opened: Opened,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    await embed.main("hello?", engine=FakeEngine())
    text, tokens = capsys.readouterr().out.splitlines()
    assert len(text) == 64
    assert tokens == "[64 tokens]"
    assert len(opened.in_runtime) == 1
