"""Rows that a draft model serves outgrow memory, leave and return, and survive crashes: each
answers what it answers undisturbed."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from tests.drafts.models import saved_draft
from tests.families import save
from tests.real.alone import alone_of
from tests.real.serving import running
from tests.real.test_mixed import PROMPTS, TOKENS, assert_as_alone
from tests.real.test_preemption import fine_capacities, lower_ones_first
from tests.real.wishes import some_of, wishes
from tests.sim.world import Eager
from trouper.actors.scheduling import core


@pytest.mark.parametrize("draft", ["itself", "other"])
@pytest.mark.long(but=("other",))
async def test_rows_go_on_after_they_were_preempted(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their KV in both models leaves with them, and counts as theirs."""
    monkeypatch.setattr(core, "Speculation", Eager)
    path = str(save("llama", tmp_path / "llama"))
    draft_model = path if draft == "itself" else saved_draft(tmp_path)
    with fine_capacities():
        async with running(path) as runtime:
            asked = some_of(wishes(runtime.tokenizer, PROMPTS, TOKENS), int(draft == "other"))
            alone_bytes = runtime.model.kv.token_bytes
    wanted = await alone_of(path, asked)
    asked = {
        name: attrs.evolve(wish, speculation="draft_model", priority=place % 2)
        for place, (name, wish) in enumerate(asked.items())
    }
    with fine_capacities():
        async with running(path, draft_model=draft_model) as runtime:
            limit = 3 * runtime.model.kv.row_bytes(max(map(len, PROMPTS)) + 2 * TOKENS)
            assert runtime.model.kv.token_bytes > alone_bytes
        async with running(path, draft_model=draft_model, kv_memory=limit) as runtime:
            heard = await lower_ones_first(runtime, asked)
            stats = runtime.health().scheduler
    assert stats.preemptions > 3, stats
    assert stats.requests_completed == len(asked)
    drafts = stats.speculation.by_proposer["draft_model"]
    assert drafts.drafted > 100
    assert (drafts.accepted > 100) == (draft == "itself")
    for wish in asked.values():
        await assert_as_alone(path, wish, heard[wish.request_id], wanted[wish.request_id])
