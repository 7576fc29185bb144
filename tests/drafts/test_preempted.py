"""Mixes with drafts where memory is short: rows leave with drafts on their way, and go on with the
same tokens."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import trio

from tests.arithmetic import full_float32
from tests.drafts.mixes import Mix, play
from trouper.protocol.health import SchedulerStats


@full_float32
@pytest.mark.parametrize(
    ("name", "seeds"),
    [("llama", (8, 12, 16, 7)), ("qwen3_5", (0, 5, 1, 2)), ("recurrent_gemma", (17, 19, 22, 3))],
)
@pytest.mark.long(but=("llama-*",))
async def test_rows_that_draft_go_on_after_they_were_preempted(
    name: str, seeds: tuple[int, ...], tmp_path: Path
) -> None:
    """Which rows meet depends on time, so that one mix or another has no preemption."""
    for seed in seeds:
        facts = await played_short_of_memory(name, seed, tmp_path / str(seed))
        if facts.preemptions and facts.speculation.accepted:
            return
    pytest.fail("in no mix was a row preempted, and drafts were accepted")


async def played_short_of_memory(name: str, seed: int, directory: Path) -> SchedulerStats:
    """Play a mix with room for two long rows. Raises where anything differs."""
    await trio.Path(directory).mkdir()
    mix = attrs.evolve(
        Mix.of(name, seed), draft="", head=None, short=True
    )  # Another model's drafts would all be wrong.
    mix.settings["speculation"] = "ngram"
    return (await play(directory, mix)).facts
