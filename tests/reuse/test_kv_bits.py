"""KV in 8 bits: what comes from the cache is what the same format computes cold. Models with heads
that groups divide.

Rounding in other chunks may move a value over the edge of its step, so the bound on
log-probabilities is that of tests/engine/test_quantized.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.arithmetic import skip_if_routed
from tests.engine.test_quantized import GAP, other_half
from tests.families import FAMILIES
from tests.family_configs import wide
from tests.reuse.serving import Ask, Heard, Tiny, agreed, cold, serving, text

LONG = text(100, 1)
EIGHT: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32}


@pytest.fixture(scope="session")
def wide_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    directory = tmp_path_factory.mktemp("wide")
    return cache(lambda name: Tiny.saved(name, directory, wide(FAMILIES[name])))


@other_half
@pytest.mark.long(but=("deepseek_v3",))
async def test_8_bits_from_memory_and_disk(
    name: str, wide_of: Callable[[str], Tiny], tmp_path: Path
) -> None:
    skip_if_routed(FAMILIES[name])
    tiny, disk = wide_of(name), {**EIGHT, "ssd_cache_dir": tmp_path / "blocks"}
    async with serving(tiny, **disk) as served:
        assert "8 bits in groups of 32" in served.runtime.model.kv.description
        heard = [await served.one(LONG)]
        goes_on = heard[0].text + text(10, 2)
        heard += await served.ask(Ask(LONG), Ask(goes_on), Ask(LONG[:40] + text(20, 3)))
        assert [each.cached for each in heard] == [
            0,
            99,
            heard[0].computed,
            32 if tiny.layout.needs_snapshots else 40,
        ]
    async with serving(tiny, **disk) as served:
        heard.append(await served.one(goes_on))
        assert heard[-1].cached == len(goes_on) - 1
        assert served.stats.cache.hits_disk > 0
    wanted = await cold(tiny, [each.ask for each in heard], **EIGHT)
    assert compared(heard, wanted) > 0.6 * sum(len(each.tokens) for each in heard)


def compared(heard: list[Heard], wanted: list[Heard]) -> int:
    return sum(agreed(mine, theirs, GAP, GAP) for mine, theirs in zip(heard, wanted, strict=True))


@pytest.mark.parametrize("name", ["llama"])
async def test_it_is_another_namespace(
    name: str, wide_of: Callable[[str], Tiny], tmp_path: Path
) -> None:
    """F9: blocks of plain KV are never continued in 8 bits."""
    disk: dict[str, Any] = {"ssd_cache_dir": tmp_path / "blocks"}
    async with serving(wide_of(name), **disk) as served:
        await served.one(LONG)
    for settings, found in [(EIGHT, False), ({}, True)]:
        async with serving(wide_of(name), **disk, **settings) as served:
            assert ((await served.one(LONG)).cached > 0) is found
