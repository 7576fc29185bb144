"""`cache_scope`: prompts of another group of keys, or of another adapter, share nothing, whatever
salt their client chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reuse.serving import Ask, Tiny, assert_as_cold, serving, text, until
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Plan
from trouper.protocol.requests import CacheScope

PROMPT = text(100, 1)
NOBODY, ONE, OTHER = CacheScope(), CacheScope(group="one"), CacheScope(group="other")
ADAPTER = CacheScope(group="one", adapter="one")
pytestmark = pytest.mark.parametrize("name", ["llama"])


async def test_scopes_never_share(name: str, tiny: Tiny) -> None:
    async with serving(tiny) as served:
        heard = []
        for scope, cached in [
            (NOBODY, 0),
            (ONE, 0),
            (OTHER, 0),
            (ADAPTER, 0),
            (ONE, 99),
            (NOBODY, 99),
            (ADAPTER, 99),
        ]:
            heard.append(await served.one(PROMPT, scope=scope))
            assert heard[-1].cached == cached, scope
        for salt in ("one", "\xff", "one\xff\xff", "\xffone\xff\xff"):
            assert (await served.one(PROMPT, salt=salt)).cached == 0, "a salt is no scope"
            assert (await served.one(PROMPT, scope=ONE, salt=salt)).cached == 0
    await assert_as_cold(tiny, heard)


async def test_no_row_waits_for_another_scope(name: str, tiny: Tiny) -> None:
    async with serving(tiny, prefill_step_size=16, gather_ms=50) as served:
        heard = await served.ask(
            *(Ask(PROMPT, scope=scope) for scope in (ONE, OTHER, ONE, ADAPTER))
        )
        assert [each.cached for each in heard] == [0, 0, 99, 0]
        assert served.stats.cache.waited == 1
    await assert_as_cold(tiny, heard)


async def test_the_disk_keeps_scopes_apart(name: str, tiny: Tiny, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"ssd_cache_dir": tmp_path / "blocks"}
    async with serving(tiny, **disk) as served:
        heard = [await served.one(PROMPT, scope=ONE)]
    for scope, cached in [(OTHER, 0), (ONE, 99), (NOBODY, 0), (ADAPTER, 0)]:
        async with serving(tiny, **disk) as served:
            heard.append(await served.one(PROMPT, scope=scope))
            assert heard[-1].cached == cached
            assert (served.stats.cache.hits_disk > 0) == bool(cached)
    await assert_as_cold(tiny, heard)


async def test_a_sequence_keeps_its_scope_beyond_a_crash(name: str, tiny: Tiny) -> None:
    """The engine crashes once while the first answer is decoded; the next scheduler resumes it."""
    crashes = ["once"]

    def crash(plan: Plan, engine: StepEngine) -> None:
        if crashes and plan.decode:
            raise RuntimeError(crashes.pop())

    async with serving(tiny, crash) as served:
        heard = [await served.one(PROMPT, scope=ONE)]
        await until(lambda: served.stats.recovery.crashes == 1)
        for scope, cached in [(NOBODY, 0), (OTHER, 0), (ONE, 99)]:
            heard.append(await served.one(PROMPT, scope=scope))
            assert heard[-1].cached == cached
    await assert_as_cold(tiny, heard)
