"""Rows that an MTP head serves outgrow memory, leave and return: each answers what it answers
undisturbed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import attrs
import pytest

from tests.arithmetic import full_float32
from tests.heads import Kind, save_with_head
from tests.real.alone import alone_of
from tests.real.serving import running
from tests.real.test_mixed import PROMPTS, TOKENS, assert_as_alone
from tests.real.test_preemption import fine_capacities, lower_ones_first
from tests.real.wishes import some_of, wishes
from tests.sim.world import Eager
from trouper.actors.scheduling import core


@full_float32
@pytest.mark.parametrize(("kind", "name"), [("of states", "qwen3_5"), ("random", "deepseek_v3")])
@pytest.mark.long(but=("of states-qwen3_5",))
async def test_rows_with_a_head_go_on_after_they_were_preempted(
    name: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's KV leaves with the row's, and counts as its own."""
    monkeypatch.setattr(core, "Speculation", Eager)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = str(save_with_head(name, tmp_path / name, kind))
    # DeepSeek's rows have one bank.
    with fine_capacities() if name == "qwen3_5" else nullcontext():
        async with running(path, speculation="off") as runtime:
            asked = some_of(wishes(runtime.tokenizer, PROMPTS, TOKENS), int(name == "qwen3_5"))
            alone_bytes = runtime.model.kv.token_bytes
        asked = {
            name: attrs.evolve(wish, speculation="mtp", priority=place % 2)
            for place, (name, wish) in enumerate(asked.items())
        }
        wanted = await alone_of(path, asked)
        async with running(path) as runtime:
            kv = runtime.model.kv
            assert kv.token_bytes > alone_bytes
            limit = 2 * (kv.row_bytes(max(map(len, PROMPTS)) + 2 * TOKENS) + kv.draft_state_bytes)
        async with running(path, kv_memory=limit, spec_draft_tokens=2) as runtime:
            heard = await lower_ones_first(runtime, asked)
            stats = runtime.health().scheduler
    assert stats.preemptions > 0, stats
    assert (stats.requests_completed, stats.recovery.crashes) == (len(asked), 0)
    drafts = stats.speculation.by_proposer["mtp"]
    assert drafts.drafted > 100
    assert (drafts.accepted > 100) == (kind != "random")
    for wish in asked.values():
        await assert_as_alone(path, wish, heard[wish.request_id], wanted[wish.request_id])
