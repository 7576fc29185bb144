"""A few kills; as many as one likes: `just kill-loop N`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.family_configs import LONG
from tests.kill_loop import BLOCKS, kill_loop

KILLS, SEED, LENGTHS = (5, 7, BLOCKS) if LONG else (3, 1003, (2, 3, 5, 8))
"""Of the five kills of seed 7 one comes before the server is ready, one long after a store, and
three wait for a write to begin; of the three of seed 1003 one waits for a write, the next comes
before the server is ready, on what was stored, and one long after a store."""


@pytest.mark.long
def test_a_server_that_is_killed_answers_right_and_finds_what_it_stored(tmp_path: Path) -> None:
    tally = kill_loop(KILLS, SEED, tmp_path, LENGTHS)
    assert tally.good, tally
    assert tally.kills >= KILLS
    assert tally.early == 1
    assert tally.checked >= KILLS
    assert tally.fresh, "nothing was stored before a kill"
