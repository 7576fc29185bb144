"""The engine crashes beneath rows of which no two have the same parameters: each still answers what
it answers alone.

After a crash all rows that were in the step are suspects, so each is also tried alone, leaves the
engine, and resumes beside the others. Tokens, text, log-probabilities, reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.families import save
from tests.real.alone import alone_of
from tests.real.serving import Heard, hear, running
from tests.real.test_mixed import PROMPTS, TOKENS, assert_as_alone
from tests.real.wishes import some_of, wishes
from trouper import Generate, Runtime
from trouper.engine.step import Launched, StepEngine
from trouper.protocol.plans import Plan

FAMILIES = (("llama", "ngram"), ("gpt_oss", "ngram"), ("jamba", "off"), ("lfm2", "ngram"))
COMPANY = 4
"""Rows that decode when it crashes, at least: alone nobody is guilty."""


class Crashing(StepEngine):
    """Crashes before a launch, after one, and when tokens are read: once each."""

    left: list[str]
    steps = 0

    def _dies(self, where: str, rows: int) -> bool:
        if rows < COMPANY or not Crashing.left or Crashing.left[0] != where:
            return False
        Crashing.steps += 1
        if Crashing.steps < 6:
            return False
        Crashing.steps = 0
        del Crashing.left[0]
        return True

    def launch(self, plan: Plan) -> Launched:
        if self._dies("before", len(plan.decode)):
            raise RuntimeError("before a launch")
        launched = super().launch(plan)
        if self._dies("after", len(plan.decode)):
            raise RuntimeError("after a launch")
        return launched

    def collect(self, launched: Launched) -> Any:
        if self._dies("reading", len(launched.plan.decode)):
            raise RuntimeError("in the middle of a read")
        return super().collect(launched)


async def all_at_once(
    runtime: Runtime, asked: dict[str, Generate], *, begun: Callable[[], object] = lambda: None
) -> dict[str, Heard]:
    """`begun` is called with each delta of any."""
    heard: dict[str, Heard] = {}

    async def one(name: str) -> None:
        heard[name] = await hear(await runtime.submit(asked[name]), begun=begun)

    async with trio.open_nursery() as nursery:
        for name in asked:
            nursery.start_soon(one, name)
    return heard


@pytest.mark.parametrize(("name", "speculation"), FAMILIES)
@pytest.mark.long(but=("llama-ngram", "jamba-off"))
async def test_rows_of_every_kind_go_on_after_crashes(
    name: str, speculation: Any, tmp_path: Path
) -> None:
    path = str(save(name, tmp_path / name))
    async with running(path) as runtime:
        asked = some_of(
            wishes(runtime.tokenizer, PROMPTS, TOKENS), FAMILIES.index((name, speculation)) % 2
        )
    asked = {name: attrs.evolve(wish, speculation=speculation) for name, wish in asked.items()}
    wanted = await alone_of(path, asked)
    Crashing.left, Crashing.steps = ["before", "after", "reading"], 0
    async with running(path, Crashing) as runtime:
        heard = await all_at_once(runtime, asked)
        recovery = runtime.health().scheduler.recovery
    assert Crashing.left == [], "all crashes came"
    assert (recovery.crashes, recovery.convicted, recovery.refused) == (3, 0, 0)
    assert recovery.resumed > 3 * COMPANY
    for wish in asked.values():
        await assert_as_alone(path, wish, heard[wish.request_id], wanted[wish.request_id])
