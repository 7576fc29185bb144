"""`cache_salt`: prompts share only with those of the same salt, in memory, on disk and while they
wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reuse.serving import Ask, Tiny, assert_as_cold, serving, text

PROMPT = text(100, 1)
pytestmark = pytest.mark.parametrize("name", ["llama", "mamba2"])


async def test_tenants_never_share(name: str, tiny: Tiny) -> None:
    async with serving(tiny) as served:
        heard = []
        for salt, cached in [
            ("", 0),
            ("a", 0),
            ("b", 0),
            ("a", 99),
            ("", 99),
            ("b", 99),
            ("ab", 0),
        ]:
            heard.append(await served.one(PROMPT, salt=salt))
            assert heard[-1].cached == cached, salt
    await assert_as_cold(tiny, heard)


async def test_nobody_waits_for_another_tenant(name: str, tiny: Tiny) -> None:
    async with serving(tiny, prefill_step_size=16, gather_ms=50) as served:
        heard = await served.ask(*(Ask(PROMPT, salt=salt) for salt in ("a", "b", "a")))
        assert [each.cached for each in heard] == [0, 0, 99]
        assert served.stats.cache.waited == 1
    await assert_as_cold(tiny, heard)


async def test_nor_from_disk(name: str, tiny: Tiny, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"ssd_cache_dir": tmp_path / "blocks"}
    async with serving(tiny, **disk) as served:
        heard = [await served.one(PROMPT, salt="a")]
    for salt, cached in [("b", 0), ("a", 99), ("", 0)]:
        async with serving(tiny, **disk) as served:
            heard.append(await served.one(PROMPT, salt=salt))
            assert heard[-1].cached == cached
            assert (served.stats.cache.hits_disk > 0) == bool(cached)
    await assert_as_cold(tiny, heard)
