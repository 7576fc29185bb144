"""A few kills; as many as one likes: `just kill-loop N`."""

from __future__ import annotations

from pathlib import Path

from tests.kill_loop import kill_loop

KILLS = 5
SEED = 7
"""Of its five kills one comes before the server is ready, one long after a store, and three wait for a write to begin."""


def test_a_server_that_is_killed_answers_right_and_finds_what_it_stored(tmp_path: Path) -> None:
    tally = kill_loop(KILLS, SEED, tmp_path)
    assert tally.good, tally
    assert tally.kills >= KILLS
    assert tally.early == 1
    assert tally.checked >= KILLS
    assert tally.fresh, "nothing was stored before a kill"
