"""`just ranks-restarts` is the long one, with the embedded model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.models import save
from tests.ranks.restarts import group, play

WORDS = 150


@pytest.mark.long
def test_r4_f27_ranks_that_are_killed_while_they_write_find_what_all_had_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with group(2, tmp_path / "blocks", "--model", str(save("llama", tmp_path / "llama"))) as server:
        tally = play(server, 1, WORDS)
    assert tally.good, tally
    assert tally.kills == 1
    assert tally.cached > 0, tally
