"""Mixes with drafts where memory is short: rows leave with drafts on their way, and go on with the same tokens."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from tests.arithmetic import full_float32
from tests.drafts.mixes import Mix, alone, assert_the_same, together
from tests.drafts.models import saved
from tests.real.serving import running
from tests.real.test_preemption import fine_capacities

LONGEST = 140
"""Tokens of the longest prompt and its answer."""


@full_float32
@pytest.mark.parametrize(("name", "seed"), [("llama", 8), ("qwen3_5", 0), ("recurrent_gemma", 6)])
async def test_rows_that_draft_go_on_after_they_were_preempted(name: str, seed: int, tmp_path: Path) -> None:
    mix = attrs.evolve(Mix.of(name, seed), draft="", head=None)  # Another model's drafts would all be wrong.
    mix.settings["speculation"] = "ngram"
    path = saved(name, tmp_path, mix.settings["kv_bits"])
    wanted = await alone(path, mix)
    with fine_capacities():
        async with running(path, **mix.kv) as runtime:
            kv = runtime.model.kv
        mix.settings["kv_memory"] = 2 * (kv.row_bytes(LONGEST) + kv.draft_state_bytes)
        played = await together(path, mix, wanted)
    await assert_the_same(path, mix, wanted, played)
    assert played.facts.preemptions > 0
    assert played.facts.speculation.accepted > 0
