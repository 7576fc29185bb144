"""Long answers, many at once: what drifts shows only after hundreds of tokens.
TROUPER_LONG_TESTS=1: 2000 tokens each, of every family that drafts, by n-grams, by a draft model
and by the heads that families have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from tests.drafts.models import DRAFTING
from tests.engine.driver import GREEDY, Driver, Request, Row
from tests.engine.naive import Floats, choose, shaped, softmax
from tests.engine.test_draft_model import other
from tests.engine.test_mtp import head_of, loaded
from tests.families import build, prompts
from tests.family_configs import VOCABULARY
from tests.heads import CONFIGS, HEADS
from tests.real.serving import CLOSE, ROUNDING
from trouper.engine.step import StepEngine
from trouper.protocol.plans import ProposerName
from trouper.protocol.sampling import Sampling

LONG = bool(os.environ.get("TROUPER_LONG_TESTS"))
TOKENS = 2000 if LONG else 300
LENGTHS = (3, 17, 40, 5, 64, 9)
MANY = LENGTHS * 2 if LONG else LENGTHS
UNDECIDED = ("kimi_linear", "qwen3_next")
"""Routers that rounding decides somewhere along 2000 tokens. Without drafts log-probabilities of
single rows differ as much from the model's own: by 0.27 and 6e-4 there."""
FEW = Sampling(
    temperature=0.7, seed=5, top_k=8, logit_bias=tuple((token, 15.0) for token in range(40, 43))
)
"""Few tokens are likely, so that n-grams come again, and as often go on in another way."""


def sampling(row: int) -> Sampling:
    return (
        Sampling(temperature=0),
        attrs.evolve(FEW, seed=row),
        attrs.evolve(FEW, temperature=0, presence_penalty=0.2),
    )[row % 3]


def asked(lengths: tuple[int, ...], tokens: int) -> list[Request]:
    return [
        Request(prompt, tokens, sampling(row), join=3 * row, logprobs=2, drafts=True)
        for row, prompt in enumerate(prompts(lengths))
    ]


def drafted(model: nn.Module, requests: Sequence[Request], **drafters: Any) -> list[Row]:
    """`drafters`: a draft model and a head, if there are any. Most drafts are by n-grams all the
    same: these are right."""
    names: list[ProposerName] = ["ngram"] * 5
    if "draft_model" in drafters:
        names.append("draft_model")
    if "head" in drafters:
        names.append("mtp")
    turn = cycle(names)
    driver = Driver(
        StepEngine(model, VOCABULARY, **drafters),
        allow=lambda step: (16, 0, 4)[step % 3],
        propose=lambda _: next(turn),
    )
    rows = driver.play(requests)
    accepted = sum(right for _, _, right in driver.drafted)
    assert requests[0].tokens // 2 < accepted < sum(tokens for _, tokens, _ in driver.drafted)
    return rows


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.long(but=("llama",))
def test_f22_long_answers_are_equal_to_those_without_drafts(name: str) -> None:
    tokens = 300 if LONG else 200
    model, requests = build(name), asked(LENGTHS, tokens)
    plain = Driver(StepEngine(model, VOCABULARY)).play(requests)
    compared = 0
    for row, wanted in zip(drafted(model, requests), plain, strict=True):
        got = row.tokens[:tokens]
        same = next((n for n in range(tokens) if got[n] != wanted.tokens[n]), tokens)
        compared += same
        if same < tokens:
            # Only where rounding may have decided: log-probabilities of plain greedy rows show it.
            (_, best), (_, second) = wanted.logprobs[same].top
            assert row.request.sampling == GREEDY and best - second < ROUNDING, (
                name,
                row.id,
                same,
                best - second,
            )
    assert compared > 0.9 * tokens * len(requests)


def along(model: nn.Module, tokens: Sequence[int], step: int = 32) -> Floats:
    """(tokens, vocabulary): what the model alone says after each of them, by mlx-lm's own cache."""
    cache, said = make_prompt_cache(model), []
    for begin in range(0, len(tokens), step):
        logits = model(mx.array([tokens[begin : begin + step]]), cache=cache)[0]
        said.append(np.array(logits.astype(mx.float32), np.float64))
    return np.concatenate(said)


@attrs.define
class Compared:
    certain: int = 0
    """Tokens that rounding cannot change."""
    wrong: int = 0
    """Of them those that the model alone would not say."""
    apart: float = 0.0
    """The largest difference between log-probabilities."""


def compare(model: nn.Module, row: Row, tokens: int) -> Compared:
    """Each token with what the sampler makes of the model's own logits, given those before. So a
    row whose rounding took another way than that of a row without drafts is still compared to its
    end."""
    prompt, answer, how = list(row.request.prompt), row.tokens[:tokens], row.request.sampling
    logits = along(model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
    compared = Compared()
    for place, token in enumerate(answer):
        wanted, certain = choose(shaped(logits[place], how, prompt, answer[:place]), how, place)
        compared.certain += certain
        compared.wrong += certain and token != wanted
        logprob = np.log(softmax(logits[place])[token])
        compared.apart = max(compared.apart, abs(logprob - row.logprobs[place].logprob))
    return compared


@pytest.mark.parametrize("name", DRAFTING if LONG else ["qwen3_moe"])
@pytest.mark.long
def test_f22_long_answers_are_what_the_model_says_to_the_end(name: str) -> None:
    model, drafters = build(name, config=CONFIGS[name]), dict[str, Any]()
    if LONG:
        drafters["draft_model"] = other()
        if name in HEADS:
            model, drafters["head"] = loaded(name).model, head_of(name)
    compared = [
        compare(model, row, TOKENS) for row in drafted(model, asked(MANY, TOKENS), **drafters)
    ]
    assert not any(row.wrong for row in compared), compared
    apart = sorted(row.apart for row in compared)
    assert apart[len(apart) // 2 if name in UNDECIDED else -1] < CLOSE, compared
    assert sum(row.certain for row in compared) > 0.98 * TOKENS * len(compared), (
        "too little was compared"
    )
