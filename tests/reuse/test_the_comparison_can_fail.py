"""Negative controls: what the tests of this folder would say of a cache that gives back something
else."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import attrs
import mlx.core as mx
import numpy as np
import pytest

from tests.arithmetic import full_float32
from tests.reuse.serving import Heard, Tiny, assert_as_cold, serving, text
from trouper.engine.step import StepEngine
from trouper.protocol.plans import BlockId, Plan, Restore

PROMPT = text(100, 1)
Part = Callable[[Restore], BlockId | None]


def a_block(restore: Restore) -> BlockId:
    return restore.blocks[1]


def the_snapshot(restore: Restore) -> BlockId | None:
    return restore.snapshot


def bend(engine: StepEngine, block: BlockId, error: float) -> None:
    """One value of what is stored, or the largest of a recurrent state, which forgets small
    ones."""
    stored = engine.blocks._stored[block]
    values = np.array(stored.arrays[-1])
    values.flat[int(np.argmax(np.abs(values)))] += error
    engine.blocks._stored[block] = attrs.evolve(
        stored, arrays=(*stored.arrays[:-1], mx.array(values))
    )


async def again(tiny: Tiny, part: Part, error: float) -> list[Heard]:
    """The same prompt twice; before the second one restores, something of what it restores
    changes."""

    def before(plan: Plan, engine: StepEngine) -> None:
        for admit in plan.admit:
            block = part(admit.restore) if admit.restore is not None else None
            if block is not None:
                bend(engine, block, error)

    async with serving(tiny, before) as served:
        heard = [await served.one(PROMPT), await served.one(PROMPT)]
    assert heard[1].cached == 99
    return heard


@full_float32
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("llama", a_block),
        ("deepseek_v3", a_block),
        ("gemma3_text", a_block),
        ("gemma3_text", the_snapshot),
        ("mamba2", the_snapshot),
        ("falcon_h1", a_block),
        ("falcon_h1", the_snapshot),
    ],
)
@pytest.mark.long(but=("llama-a_block", "falcon_h1-*"))
async def test_one_wrong_value(name: str, part: Part, tiny: Tiny) -> None:
    await assert_as_cold(tiny, await again(tiny, part, 0))
    with pytest.raises(AssertionError, match="is right"):
        await assert_as_cold(tiny, await again(tiny, part, 5))


@full_float32
@pytest.mark.parametrize("name", ["llama"])
async def test_another_answer(name: str, tiny: Tiny) -> None:
    async with serving(tiny) as served:
        heard = await served.one(PROMPT)
    said = heard.logprobs[3]
    (_, most), *others = said.top
    wrong = attrs.evolve(said, token=others[0][0], logprob=others[0][1])
    for logprobs in (
        (*heard.logprobs[:3], wrong, *heard.logprobs[4:]),
        (
            *heard.logprobs[:3],
            attrs.evolve(said, top_logprobs=array("f", [most + 1e-3, *said.top_logprobs[1:]])),
            *heard.logprobs[4:],
        ),
    ):
        with pytest.raises(AssertionError, match="is right"):
            await assert_as_cold(tiny, [attrs.evolve(heard, logprobs=logprobs)])
