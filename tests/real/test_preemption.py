"""Rows outgrow memory, leave the batch and return, while no two have the same parameters: each
answers what it answers undisturbed.

TROUPER_LONG_TESTS=1 in the environment plays every family.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import attrs
import pytest
import trio

from tests.families import FAMILIES, save
from tests.real.alone import alone_of
from tests.real.serving import Heard, running
from tests.real.test_crashes import all_at_once
from tests.real.test_mixed import LONG, PROMPTS, TOKENS, assert_as_alone
from tests.real.wishes import some_of, wishes
from tests.reuse.serving import text
from trouper import RequestFailed, Runtime, Sampling, TokenPrompt
from trouper.actors.scheduling.step_statistics import SchedulerCounters
from trouper.engine import step
from trouper.engine.kv import kv_layout
from trouper.engine.passes import pass_shapes
from trouper.engine.step import Launched, StepEngine
from trouper.protocol.kv import KvLayout
from trouper.protocol.plans import Stepped
from trouper.protocol.requests import Generate

CASES: list[tuple[str, str | None]] = [
    ("llama", "ngram"),
    ("gpt_oss", "ngram"),
    ("jamba", "off"),
    ("qwen3_5", "ngram"),
    ("mamba2", "ngram"),
]
if LONG:
    CASES.append(("llama", "off"))
    CASES += [(name, None) for name in FAMILIES if name not in {name for name, _ in CASES}]
PRIORITIES = 4
"""Rows of one size leave only for a higher priority, so requests of several come, one after
another."""


@contextmanager
def fine_capacities() -> Iterator[None]:
    """Rows grow every 16 tokens instead of every 256, in banks of 16 tokens and more, so that short
    ones outgrow memory, too. Not in the self-check, whose rows all share a bank: it tries several
    banks apart, which some models cannot have."""
    fine = attrs.evolve(pass_shapes.of_device(), first_bank=16, shared_tokens=64)
    with (
        patch.object(kv_layout, "KvLayout", partial(KvLayout, capacity_step=16, shared_tokens=64)),
        patch.object(kv_layout, "FIRST_BANK", 16),
        patch.object(pass_shapes, "STEP", 16),
        patch.object(step, "of_device", lambda: fine),
    ):
        yield


async def lower_ones_first(runtime: Runtime, asked: dict[str, Generate]) -> dict[str, Heard]:
    """Those of each priority come when one of the next lower has begun, so that rows leave also
    where no row grows: recurrent states do not."""
    heard: dict[str, Heard] = {}

    async def some(priority: int, begun: trio.Event) -> None:
        equals = {name: wish for name, wish in asked.items() if wish.priority == priority}
        heard.update(await all_at_once(runtime, equals, begun=begun.set))

    async with trio.open_nursery() as nursery:
        for priority in sorted({wish.priority for wish in asked.values()}, reverse=True):
            begun = trio.Event()
            nursery.start_soon(some, priority, begun)
            await begun.wait()
    return heard


@pytest.mark.parametrize(("name", "speculation"), CASES)
@pytest.mark.long(but=("jamba-off", "gpt_oss-ngram", "llama-ngram"))
async def test_rows_of_every_kind_go_on_after_they_were_preempted(
    name: str, speculation: Any, tmp_path: Path
) -> None:
    path = str(save(name, tmp_path / name))
    with fine_capacities():
        async with running(path) as runtime:
            asked = some_of(
                wishes(runtime.tokenizer, PROMPTS, TOKENS), CASES.index((name, speculation)) % 2
            )
            kv = runtime.model.kv
    # Without the states that rows keep while they draft, which are up to seven times the row,
    # memory would hold one row of some models.
    states_bytes = 0 if speculation == "off" else kv.draft_state_bytes
    limit = 3 * (kv.row_bytes(max(map(len, PROMPTS)) + 2 * TOKENS) + states_bytes)
    wanted = await alone_of(path, asked)
    asked = {
        name: attrs.evolve(wish, speculation=speculation, priority=place % PRIORITIES)
        for place, (name, wish) in enumerate(asked.items())
    }
    with fine_capacities():
        async with running(path, kv_memory=limit) as runtime:
            heard = await lower_ones_first(runtime, asked)
            stats = runtime.health().scheduler
    # A row at least leaves for each priority but the first.
    assert stats.preemptions >= PRIORITIES - 1, stats
    assert stats.requests_completed == len(asked)
    assert stats.kv_limit_bytes == limit
    for wish in asked.values():
        await assert_as_alone(path, wish, heard[wish.request_id], wanted[wish.request_id])


@pytest.mark.skipif(
    pass_shapes.of_device().rounded,
    reason="capacities are rounded here: so little memory holds no row",
)
async def test_what_never_fits_is_refused_and_what_outgrows_memory_is_shortened(
    tmp_path: Path,
) -> None:
    path = str(save("llama", tmp_path / "llama"))

    def request(tokens: int, max_tokens: int) -> Generate:
        return Generate(
            request_id=f"{tokens}",
            prompt=TokenPrompt((7,) * tokens),
            sampling=Sampling(temperature=0),
            max_tokens=max_tokens,
            ignore_eos=True,
        )

    with fine_capacities():
        # A row counts half a step more.
        async with running(path, kv_memory=1024 * (64 + 8)) as runtime:
            with pytest.raises(
                RequestFailed,
                match=r"maximum context length is 64 tokens \(all that --kv-memory .* leaves to "
                r"one request\)\. However, you requested 65 tokens \(64 in the prompt, 1 in the "
                r"completion\), .* the prompt is too long",
            ) as refused:
                await runtime.submit(request(64, 1))
            problem = refused.value.problem
            assert (problem.status, problem.param) == (400, "prompt")
            assert problem.code == "context_length_exceeded"
            with await runtime.submit(request(60, 30)) as answer:
                assert answer.accepted.max_tokens == 4
                tokens = [token async for delta in answer for token in delta.tokens]
                assert answer.finished is not None and answer.finished.reason == "length"
    assert len(tokens) == 4


async def test_a_tenth_of_the_memory_is_enough_for_all(tmp_path: Path) -> None:
    """What rows and cached blocks hold is looked at after each plan, as the scheduler counts it and
    as the engine has it."""
    path, dice = str(save("llama", tmp_path / "llama")), Random(3)
    lengths = [(int(10 * 20 ** dice.random()), dice.randint(5, 60)) for _ in range(60)]
    asked = {
        str(place): Generate(
            request_id=str(place),
            prompt=TokenPrompt(text(prompt, place)),
            max_tokens=tokens,
            ignore_eos=True,
            sampling=Sampling(temperature=0),
        )
        for place, (prompt, tokens) in enumerate(lengths)
    }
    seen: list[int] = []
    held: list[int] = []
    publish, collect = SchedulerCounters.publish, StepEngine.collect

    def collected(engine: StepEngine, launched: Launched) -> Stepped:
        stepped = collect(engine, launched)
        if len(engine.lengths()) > 1:
            held.append(engine.nbytes + engine.blocks.nbytes)
        return stepped

    def published(counters: SchedulerCounters, **gauges: Any) -> None:
        if gauges["active_sequences"] > 1:
            seen.append(gauges["kv_row_bytes"] + gauges["cache"].bytes)
        publish(counters, **gauges)

    with fine_capacities():
        async with running(path) as runtime:
            wanted = await all_at_once(runtime, asked)
            kv = runtime.model.kv
        limit = sum(kv.row_bytes(prompt + tokens) for prompt, tokens in lengths) // 10
        with (
            patch.object(SchedulerCounters, "publish", published),
            patch.object(StepEngine, "collect", collected),
        ):
            async with running(path, kv_memory=limit) as runtime:
                heard = await all_at_once(runtime, asked)
                stats = runtime.health().scheduler
    assert 0.7 * limit < max(seen) <= limit
    assert 0.5 * limit < max(held) <= limit
    assert (stats.requests_completed, stats.requests_errored) == (60, 0)
    assert stats.preemptions > 0
    for wish in asked.values():
        await assert_as_alone(path, wish, heard[wish.request_id], wanted[wish.request_id])
