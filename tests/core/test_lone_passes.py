"""Prompts that cannot share a pass: a step runs few of them, and each has its turn."""

from __future__ import annotations

from collections import Counter

from tests.core.driving import DrivenCore
from trouper.protocol.capabilities import Capabilities


def test_rows_that_prefill_alone_take_turns() -> None:
    """Eight prompts with a budget of 16 tokens a step: one pass of 16 tokens, not eight of two."""
    core = DrivenCore(
        capabilities=Capabilities(prefill_together="recurrent state"),
        disk=False,
        prefill_step_size=16,
        prefill_batch_size=8,
        completion_batch_size=9,
    )
    core.arrive(8, 100)
    core.until_decoding()
    before = len(core.plans)
    for seed in range(8):
        core.arrive(500, 4, seed=seed + 1)
    prefilled, worst = Counter[int](), 0
    for _ in range(100):
        core.step()
        for plan in core.plans[before:]:
            assert len(plan.prefill) <= 1
            prefilled.update({chunk.row: chunk.tokens for chunk in plan.prefill})
        before = len(core.plans)
        if len(prefilled) == 8:
            worst = max(worst, max(prefilled.values()) - min(prefilled.values()))
    assert len(prefilled) == 8
    assert worst <= 16
