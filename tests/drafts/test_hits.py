"""Rows that draft leave as much to others as rows that do not: states of before are computed where
a snapshot wants them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.arithmetic import full_float32
from tests.drafts.models import saved
from tests.engine.oracle import Foretelling
from tests.family_configs import LONG
from tests.real.serving import running
from tests.reuse.serving import text
from tests.sim.world import Eager
from trouper import Generate, Runtime, Sampling, TokenPrompt
from trouper.actors.scheduling import core
from trouper.engine import host
from trouper.engine.spec_decode.prompt_lookup import Drafting
from trouper.protocol.requests import Speculation

Tokens = tuple[int, ...]
CASES = [
    (ended, name)
    for place, name in enumerate(("qwen3_5", "falcon_h1", "rwkv7", "recurrent_gemma"))
    for turn, ended in enumerate(("by length", "by a token"))
    if LONG or place % 2 == turn
]
PROMPT, OTHER = text(50, 1), text(9, 2)
ANSWER, DRAFT, SNAPSHOT = 90, 8, 32
"""Tokens of an answer, of a draft at most, and between two snapshots."""
SETTINGS: dict[str, Any] = {
    "cache_memory": 10**8,
    "snapshot_tokens": SNAPSHOT,
    "spec_draft_tokens": DRAFT,
}


def request(prompt: Tokens, tokens: int, how: Speculation, *ends: int) -> Generate:
    return Generate(
        request_id="hits",
        prompt=TokenPrompt(prompt),
        sampling=Sampling(temperature=0),
        max_tokens=tokens,
        stop_token_ids=ends,
        ignore_eos=True,
        speculation=how,
    )


async def say(runtime: Runtime, asked: Generate) -> tuple[Tokens, int]:
    """The tokens of an answer, and how many of its prompt came from the cache."""
    with await runtime.submit(asked) as answer:
        tokens = tuple([token async for delta in answer for token in delta.tokens])
        return tokens, answer.cached_tokens


async def cold(path: str, prompt: Tokens, tokens: int) -> Tokens:
    async with running(path, **(SETTINGS | {"cache_memory": 0})) as runtime:
        return (await say(runtime, request(prompt, tokens, "off")))[0]


def foretelling(answers: Mapping[Tokens, Tokens]) -> object:
    """Drafts that are wrong now and then."""

    def made(least: int, most: int, tokens: int) -> Drafting:
        return Foretelling(least, most, tokens, answers=answers, dice=random.Random(5))

    return made


async def left(
    path: str, answer: Tokens, how: Speculation, *ends: int
) -> tuple[list[tuple[Tokens, int]], int]:
    """What follows an answer, and what follows some of its beginnings, says and finds; and how many
    drafted tokens were right."""
    with (
        patch.object(core, "Speculation", Eager),
        patch.object(host, "Drafting", foretelling({PROMPT: answer})),
    ):
        async with running(path, **SETTINGS) as runtime:
            said, _ = await say(runtime, request(PROMPT, ANSWER, how, *ends))
            assert said == answer[: len(said)]
            cuts = (len(said), len(said) - 1, len(said) // 2 + 7)
            found = [
                await say(runtime, request(PROMPT + said[:cut] + OTHER, 5, "off")) for cut in cuts
            ]
            return found, runtime.health().scheduler.speculation.accepted


@full_float32
@pytest.mark.parametrize(("ended", "name"), CASES)
@pytest.mark.long(but=("by length-qwen3_5", "by a token-recurrent_gemma"))
async def test_rows_that_draft_leave_what_others_leave(
    name: str, ended: str, tmp_path: Path
) -> None:
    """An answer that ends within a draft has a snapshot at its end, and those of its middle are as
    close as drafts allow."""
    path = saved(name, tmp_path)
    answer = await cold(path, PROMPT, ANSWER)
    new = [at for at, token in enumerate(answer) if token not in answer[:at]]
    ends = () if ended == "by length" else (answer[new[-1]],)
    plain, none = await left(path, answer, "off", *ends)
    drafted, right = await left(path, answer, "ngram", *ends)
    assert none == 0 < right
    for (said, cached), (wanted, before) in zip(drafted, plain, strict=True):
        assert said == wanted
        assert abs(cached - before) <= DRAFT + 1
    assert drafted[0][1] == plain[0][1] > len(PROMPT), "all of an answer is found"
