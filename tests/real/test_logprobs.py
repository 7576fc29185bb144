"""Log-probabilities against the model itself: one float32 forward pass over prompt and answer,
without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from tests.families import build, save
from tests.family_configs import OTHER_HALF
from tests.model.test_smollm import smollm
from tests.real.serving import CLOSE, Heard, hear, running
from tests.reuse.serving import text
from trouper import Generate, Runtime, Sampling, TokenPrompt
from trouper.protocol.replies import TokenLogprobs

TOP = 5
ONLY_WITH_CACHES = ("mlx_lm.models.gemma3n",)
"""Its last layers take keys and values out of the caches of others, and make some of their own if
there are none."""
Floats = NDArray[np.float64]


def reference(model: nn.Module, tokens: Sequence[int]) -> Floats:
    """(tokens, vocabulary): of what follows each token."""
    unused = make_prompt_cache(model) if type(model).__module__ in ONLY_WITH_CACHES else None
    logits = np.array(
        model(mx.array([list(tokens)]), cache=unused)[0].astype(mx.float32), np.float64
    )
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(np.log(weights / weights.sum(-1, keepdims=True)))


def assert_are(
    said: Sequence[TokenLogprobs], tokens: Sequence[int], exact: Floats, top: int
) -> None:
    """`exact[n]` is about `tokens[n]`."""
    assert [at.token for at in said] == list(tokens)
    own = exact[np.arange(len(tokens)), list(tokens)]
    assert np.abs([at.logprob for at in said] - own).max(initial=0) < CLOSE
    assert abs(sum(at.logprob for at in said) - own.sum()) <= CLOSE * len(tokens)
    for at, wanted in zip(said, exact, strict=True):
        assert len({token for token, _ in at.top}) == len(at.top) == top
        values = [value for _, value in at.top]
        assert values == sorted(values, reverse=True)
        assert np.abs(values - -np.sort(-wanted)[:top]).max(initial=0) < CLOSE
        assert all(abs(value - wanted[token]) < CLOSE for token, value in at.top)


def assert_scored(heard: Heard, model: nn.Module, top: int) -> None:
    """Prompt and answer, but for an end, which has none."""
    whole = heard.prompt + heard.tokens
    exact = reference(model, whole)
    begins = len(heard.prompt)
    assert_are(heard.prompt_logprobs, heard.prompt[1:], exact[: begins - 1], top)
    assert_are(
        heard.logprobs,
        heard.tokens[: len(heard.logprobs)],
        exact[begins - 1 :][: len(heard.logprobs)],
        top,
    )


async def ask(
    runtime: Runtime, prompt: tuple[int, ...], scored: int | None, tokens: int = 4
) -> tuple[Heard, int]:
    """And how many tokens came from the cache."""
    answer = await runtime.submit(
        Generate(
            request_id="scored",
            prompt=TokenPrompt(prompt),
            sampling=Sampling(temperature=0.8, seed=5),
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=scored,
            prompt_logprobs=scored,
        )
    )
    return await hear(answer), answer.cached_tokens


@pytest.mark.long
async def test_the_embedded_model() -> None:
    words = smollm().tokenizer
    prompt = words.encode("In 1969, men first walked on the moon. They came from a planet called")
    async with running(None) as runtime:
        heard, _ = await ask(runtime, prompt, 20)
    assert_scored(heard, smollm().model, 20)


@cache
def model_of(name: str) -> nn.Module:
    return build(name)


@pytest.mark.parametrize("name", OTHER_HALF)
async def test_families(name: str, tmp_path: Path) -> None:
    """A prompt of several chunks, of which one needs logits in two parts. What is cached is no
    help, and is not needed; afterwards others find what was computed."""
    first, second = text(150, 1), text(150, 2)
    async with running(str(save(name, tmp_path)), prefill_step_size=140) as runtime:
        scored, cached = await ask(runtime, first, TOP)
        assert cached == 0
        _, cached = await ask(runtime, first, None)
        assert cached == len(first) - 1, "what it computed is found by others"
        _, cached = await ask(runtime, second, None)
        again, cached = await ask(runtime, second, TOP)
        assert cached == 0, "logits were never kept"
        [single, _] = await ask(runtime, first[:1], TOP)
        assert runtime.health().scheduler.total_prefill_tokens == 150 + 1 + 150 + 150 + 1
    for heard in (scored, again, single):
        assert_scored(heard, model_of(name), TOP)


async def test_the_comparison_can_fail() -> None:
    prompt = text(20, 3)
    exact = reference(model_of("llama"), prompt)
    right = [
        TokenLogprobs(token, float(exact[place, token])) for place, token in enumerate(prompt[1:])
    ]
    assert_are(right, prompt[1:], exact[:-1], 0)
    with pytest.raises(AssertionError):
        assert_are(right, prompt[1:], exact[1:], 0)
