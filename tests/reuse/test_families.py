"""What comes from the cache is what would have been computed: every architecture, through the whole
graph.

Tokens and log-probabilities equal the cold ones, and the number of reused tokens is exactly what it
should be: models that can be cut anywhere reuse all that is known, others up to their deepest
snapshot.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trio
from mlx import nn

from tests.engine.naive import certain_answer
from tests.families import build
from tests.family_configs import ONE_HALF, OTHER_HALF
from tests.reuse.serving import (
    BLOCK,
    SNAPSHOT,
    TOKENS,
    Ask,
    Heard,
    Served,
    Tiny,
    Tokens,
    assert_as_cold,
    at_chunk,
    hear,
    serving,
    text,
    until,
)
from trouper import Answer, Sampling
from trouper.actors.scheduling.eviction import NODE_COST
from trouper.actors.scheduling.prefix_cache import APART_TOKENS

LONG = text(100, 1)
one_half = pytest.mark.parametrize("name", ONE_HALF)
other_half = pytest.mark.parametrize("name", OTHER_HALF)
"""Of the others, what each computes after a hit is tested in tests/engine/test_blocks.py."""


@cache
def model_of(name: str) -> nn.Module:
    return build(name)


def sampled(name: str, prompt: Tokens, seed: int) -> Ask:
    """With a seed whose draws no rounding changes."""
    sampling, _ = certain_answer(
        model_of(name), prompt, Sampling(temperature=0.8, seed=seed), TOKENS
    )
    return Ask(prompt, sampling)


def marks(prompt: Tokens) -> tuple[int, ...]:
    """Where a prompt without turns leaves snapshots: regularly, but not close to the one before its
    last token."""
    end = len(prompt) - 1
    return (*range(SNAPSHOT, end - APART_TOKENS + 1, SNAPSHOT), end)


class TestFromMemory:
    @one_half
    async def test_f3_f15_again_whole_and_shorter(self, name: str, tiny: Tiny) -> None:
        full = LONG[:96]
        async with serving(tiny) as served:
            heard = [await served.one(LONG)]
            assert (heard[0].cached, served.stats.cache.hits_block) == (0, 0)
            for prompt, cached in [
                (LONG, 99),
                (full, tiny.reach(95, *marks(LONG))),
                (full, 95),
                (LONG[:50], tiny.reach(49, *marks(LONG))),
                (LONG[: SNAPSHOT + 1], SNAPSHOT),
                (LONG[:1], 0),
                (LONG, 99),
            ]:
                heard.append(await served.one(prompt))
                assert heard[-1].cached == cached, len(prompt)
            assert served.stats.total_cached_tokens == sum(each.cached for each in heard)
            assert served.stats.total_prefill_tokens == sum(
                len(each.ask.prompt) - each.cached for each in heard
            )
            assert served.stats.cache.hits_block == sum(each.cached // BLOCK for each in heard)
        await assert_as_cold(tiny, heard)

    @other_half
    async def test_a_prompt_that_departs_inside_a_block(self, name: str, tiny: Tiny) -> None:
        """The second to depart there finds a snapshot, too: the first one left it."""
        async with serving(tiny) as served:
            heard = [await served.one(LONG)]
            for other, cached in [(2, tiny.reach(50, *marks(LONG))), (3, 50), (4, 50)]:
                heard += await served.ask(sampled(name, LONG[:50] + text(30, other), 10 * other))
                assert heard[-1].cached == cached
        await assert_as_cold(tiny, heard)

    @one_half
    async def test_f2_a_conversation_goes_on(self, name: str, tiny: Tiny) -> None:
        async with serving(tiny) as served:
            heard = [await served.one(LONG[:61])]
            for turn in range(3):
                heard.append(await served.one(heard[-1].text + text(15, 20 + turn)))
                assert heard[-1].cached == heard[-2].computed
            first = heard[0]
            heard.append(await served.one(first.text[:65] + text(9, 30)))
            assert heard[-1].cached == tiny.reach(65, *marks(LONG[:61]))
        await assert_as_cold(tiny, heard)

    @other_half
    async def test_requests_that_wait_for_a_leader(self, name: str, tiny: Tiny) -> None:
        """A prompt that several send at once is computed once, whatever each draws after it."""
        asks = [sampled(name, LONG, 100 * place) for place in range(3)]
        branch = LONG[:70] + text(20, 5)
        async with serving(tiny, prefill_step_size=16, gather_ms=50) as served:
            heard = await served.ask(*asks, Ask(branch))
            assert served.stats.total_prefill_tokens == len(LONG) + 2 + 20
            assert [each.cached for each in heard] == [0, 99, 99, 70]
            assert served.stats.cache.waited == 3
            assert len({each.tokens for each in heard}) == 4
        await assert_as_cold(tiny, heard)

    @one_half
    async def test_blocks_are_evicted_while_rows_run(self, name: str, tiny: Tiny) -> None:
        blocks, snapshots = 12, 3
        room = (
            blocks * (BLOCK * tiny.layout.token_bytes + NODE_COST)
            + snapshots * tiny.layout.snapshot_bytes
        )
        prompts = [LONG[:40] + text(20, 40 + place) for place in range(4)]
        heard: list[Heard] = []
        async with serving(
            tiny, num_blocks=blocks, cache_memory=room, prefill_step_size=32
        ) as served:
            for _ in range(3):
                heard += await served.ask(*map(Ask, prompts))
                cache = served.stats.cache
                assert cache.bytes <= room and cache.blocks <= blocks
                prompts = [each.text + text(10, 50) for each in heard[-4:]]
            assert cache.evicted_blocks > 0
            assert sum(each.cached for each in heard) > 0
        await assert_as_cold(tiny, heard)


class TestAborted:
    """F12, D7: whoever comes next continues where the aborted one was."""

    PROMPT = text(130, 6)
    STEP = 16

    @other_half
    async def test_in_prefill(self, name: str, tiny: Tiny) -> None:
        leader: list[Answer] = []

        async def abort() -> None:
            leader[0].close()

        async with serving(tiny, at_chunk({3: abort}), prefill_step_size=self.STEP) as served:
            leader.append(await served.submit(Ask(self.PROMPT)))
            await until(lambda: served.stats.requests_withdrawn == 1)
            heard = await served.one(self.PROMPT)
            assert 3 * self.STEP <= heard.cached <= 6 * self.STEP
            assert served.stats.total_prefill_tokens == len(self.PROMPT)
        await assert_as_cold(tiny, [heard])

    @one_half
    async def test_while_others_wait_for_it(self, name: str, tiny: Tiny) -> None:
        leader: list[Answer] = []
        heard: list[Heard] = []
        asks = [Ask(self.PROMPT), Ask(self.PROMPT[:100] + text(20, 7))]

        async def follow() -> None:
            for ask in asks:
                nursery.start_soon(one, ask)

        async def one(ask: Ask) -> None:
            heard.append(await hear(ask, await served.submit(ask)))

        async def abort() -> None:
            leader[0].close()

        async with serving(
            tiny, at_chunk({0: follow, 2: abort}), prefill_step_size=self.STEP
        ) as served:
            async with trio.open_nursery() as nursery:
                leader.append(await served.submit(asks[0]))
                await until(lambda: served.stats.requests_withdrawn == 1)
            first, second = sorted(heard, key=lambda each: each.cached)
            assert served.stats.cache.waited >= 2
            assert 3 * self.STEP <= first.cached <= 5 * self.STEP
            assert second.cached == (100 if second.ask is asks[1] else tiny.reach(100, 100))
            assert served.stats.total_prefill_tokens == len(self.PROMPT) + 20
        await assert_as_cold(tiny, heard)


class TestFromDisk:
    """A start that has not measured anything yet takes the disk, whatever computing would cost."""

    @other_half
    async def test_f8_after_a_restart(self, name: str, tiny: Tiny, tmp_path: Path) -> None:
        disk: dict[str, Any] = {"ssd_cache_dir": tmp_path / "blocks"}
        async with serving(tiny, **disk) as served:
            heard = [await served.one(LONG[:61])]
            heard.append(await served.one(heard[0].text + text(15, 60)))
        end = heard[-1].computed
        follows = heard[-1].text + text(10, 61)
        departs = heard[-1].text[:72] + text(10, 62)
        for prompt, cached in [
            (follows, end),
            (departs, tiny.reach(72, heard[0].computed)),
            (heard[0].ask.prompt, tiny.reach(60, 60)),
        ]:
            async with serving(tiny, **disk) as served:
                heard.append(await self.from_disk(served, prompt, cached))
                heard.append(await served.one(prompt + text(5, 63)))
                assert heard[-1].cached == tiny.reach(len(prompt), len(prompt) - 1), "from memory"
        await assert_as_cold(tiny, heard)

    async def from_disk(self, served: Served, prompt: Tokens, cached: int) -> Heard:
        heard = await served.one(prompt)
        assert heard.cached == cached
        assert served.stats.cache.hits_disk == -(-cached // BLOCK)
        assert served.stats.total_prefill_tokens == len(prompt) - cached
        return heard
