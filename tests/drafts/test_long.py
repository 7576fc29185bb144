"""Long answers, many at once: what drifts shows only after hundreds of tokens. TROUPER_LONG_TESTS=1: 2000 tokens each."""

from __future__ import annotations

import os

import attrs
import pytest

from tests.engine.driver import GREEDY, Driver, Request
from tests.families import build, prompts
from tests.family_configs import VOCABULARY
from tests.real.serving import ROUNDING
from trouper.engine.step import StepEngine
from trouper.protocol.sampling import Sampling

LONG = bool(os.environ.get("TROUPER_LONG_TESTS"))
TOKENS = 2000 if LONG else 300
ROWS = 12 if LONG else 6
FEW = Sampling(temperature=0.7, seed=5, top_k=8, logit_bias=tuple((token, 15.0) for token in range(40, 43)))
"""Few tokens are likely, so that n-grams come again, and as often go on in another way."""


def sampling(row: int) -> Sampling:
    return (
        Sampling(temperature=0),
        attrs.evolve(FEW, seed=row),
        attrs.evolve(FEW, temperature=0, presence_penalty=0.2),
    )[row % 3]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3_text", "qwen3_moe"] if LONG else ["llama", "gpt_oss"])
def test_f22_long_answers_are_equal_to_the_end(name: str) -> None:
    model = build(name)
    lengths = [3, 17, 40, 5, 64, 9] * (ROWS // 6)
    asked = [
        Request(prompt, TOKENS, sampling(row), join=3 * row, logprobs=2, drafts=True)
        for row, prompt in enumerate(prompts(tuple(lengths)))
    ]
    plain = Driver(StepEngine(model, VOCABULARY)).play(asked)
    driver = Driver(StepEngine(model, VOCABULARY), allow=lambda _: 16)
    compared = 0
    for row, wanted in zip(driver.play(asked), plain, strict=True):
        got = row.tokens[:TOKENS]
        same = next((n for n in range(TOKENS) if got[n] != wanted.tokens[n]), TOKENS)
        compared += same
        if (
            same < TOKENS
        ):  # Only where rounding may have decided, which raw log-probabilities show for plain greedy rows.
            (_, best), (_, second) = wanted.logprobs[same].top
            assert row.request.sampling == GREEDY and best - second < ROUNDING, (name, row.id, same, best - second)
    assert compared > 0.9 * TOKENS * ROWS
    accepted = sum(right for _, _, right in driver.drafted)
    assert TOKENS // 2 < accepted < sum(tokens for _, tokens, _ in driver.drafted)
