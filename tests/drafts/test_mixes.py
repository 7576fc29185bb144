"""A few mixes; `just spec-mixes 300` plays more, on every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.arithmetic import full_float32
from tests.drafts.mixes import Mix, play
from tests.drafts.models import saved
from tests.family_configs import LONG
from tests.real.serving import ask, running
from tests.real.test_mixed import assert_as_alone
from trouper import Generate, Sampling, TokenPrompt


@full_float32
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("llama", 0),
        ("gpt_oss", 3),
        ("rwkv7", 24),
        ("deepseek_v3", 12),
        ("qwen3_5", 6),
        ("qwen3", 39),
        *([("qwen3", 5), ("qwen3_next", 1), ("granitemoehybrid", 32)] if LONG else []),
    ],
)
@pytest.mark.long(but=("gpt_oss-*", "deepseek_v3-*"))
async def test_r9_f22_the_same_with_drafts_as_without(name: str, seed: int, tmp_path: Path) -> None:
    drafts = (await play(tmp_path, Mix.of(name, seed))).facts.speculation
    assert 0 < drafts.accepted < drafts.drafted


@full_float32
async def test_the_same_with_a_proposer_that_is_wrong_on_purpose(tmp_path: Path) -> None:
    """Memory is short, too: rows leave with wrong drafts on their way."""
    mix = Mix.of("falcon_h1", 3)
    assert (mix.oracle, mix.draft, mix.short) == ("always", "", True)
    drafts = (await play(tmp_path, mix)).facts.speculation
    assert drafts.accepted == 0 < drafts.drafted


@pytest.mark.long
async def test_other_kv_is_no_rounding(tmp_path: Path) -> None:
    """What 8 bits forgive is what rounding does to them, and not what they do."""
    eight: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32}
    path = saved("llama", tmp_path, 8)
    prompt = TokenPrompt(tuple(range(1, 40)))
    wish = Generate(
        request_id="", prompt=prompt, sampling=Sampling(temperature=0), max_tokens=9, logprobs=2
    )
    heard = {}
    for bits in (8, 4, 0):
        async with running(path, cache_memory=0, **(eight | {"kv_bits": bits})) as runtime:
            [heard[bits]] = await ask(runtime, attrs.evolve(wish, ignore_eos=True))
    await assert_as_alone(path, wish, heard[8], heard[8], **eight)
    for bits in (4, 0):
        same = attrs.evolve(heard[bits], tokens=heard[8].tokens[:1])
        with pytest.raises(AssertionError, match="is right"):
            await assert_as_alone(path, wish, same, heard[8], **eight)
