"""Attention in blocks equals mlx-lm's, however the scores are cut."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.arithmetic import cpu_only
from tests.engine.driver import GREEDY, Driver, Request
from tests.engine.test_exactness import SMALL_BANKS, model_of
from tests.families import reference
from tests.family_configs import VOCABULARY
from trouper.engine.kv import attention_seam
from trouper.engine.kv.attention_seam import plain
from trouper.engine.products import blocked_attention
from trouper.engine.step import StepEngine
from trouper.workarounds import mlx_scalar_functions

pytestmark = cpu_only
ROWS, HEADS, WIDTH, TOKENS = 3, 6, 5, 11


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_attention, "MIN_KEYS", 1)
    monkeypatch.setattr(mlx_scalar_functions, "is_needed", lambda: True)


def _masks() -> dict[str, Any]:
    visible = mx.arange(TOKENS) < mx.array([4, 7, 11])[:, None]
    of_queries = mx.arange(TOKENS) <= mx.arange(TOKENS - WIDTH, TOKENS)[:, None]
    return {
        "none": None,
        "causal": "causal",
        "of rows": visible[:, None, None],
        "of queries": of_queries[None, None],
        "of both": visible[:, None, None] & of_queries,
    }


# All at once; a row at a time; a KV head, three queries, and a query at a time.
@pytest.mark.parametrize("scores", [10**6, 400, 170, 100, 1])
@pytest.mark.parametrize("mask", _masks())
def test_blocks_attend_as_the_whole(
    scores: int, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked_attention, "BLOCK_SCORES", scores)
    queries = mx.random.normal((ROWS, HEADS, WIDTH, 8))
    keys, values = mx.random.normal((ROWS, 2, TOKENS, 8)), mx.random.normal((ROWS, 2, TOKENS, 4))
    options: dict[str, Any] = {"scale": 0.3, "mask": _masks()[mask]}
    assert blocked_attention.supports(queries, keys, values, options["mask"], options)
    ours = attention_seam.scaled_dot_product_attention(queries, keys, values, **options)
    assert ours.shape == (ROWS, HEADS, WIDTH, 4)
    assert mx.allclose(ours, plain(queries, keys, values, None, **options), atol=1e-6)


def test_garbage_behind_a_mask_is_not_attended_to() -> None:
    queries, keys = mx.random.normal((1, 2, 1, 8)), mx.random.normal((1, 1, 4, 8))
    garbage = mx.concatenate([keys, mx.full((1, 1, 2, 8), 1e30)], 2)
    mask = (mx.arange(6) < 4)[None, None, None]
    ours = blocked_attention.attend(queries, garbage, garbage, mask=mask, scale=0.3)
    assert mx.allclose(ours, plain(queries, keys, keys, None, scale=0.3, mask=None), atol=1e-6)


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_scores_that_lie_far_apart(spread: float) -> None:
    """With padding, which weighs nothing."""
    random = np.random.default_rng(0)
    queries, keys, values = (random.standard_normal((2, 3, 20, 16)) for _ in range(3))
    queries *= spread
    mask = np.arange(20) < np.array([20, 11])[:, None, None, None]
    scores = np.where(mask, queries @ keys.swapaxes(-1, -2) / 4, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ values
    inputs = [mx.array(each.astype(np.float32)) for each in (queries, keys, values)]
    output = blocked_attention.attend(*inputs, scale=0.25, mask=mx.array(mask))
    # Rounded scores of 100 differ by 1e-5.
    np.testing.assert_allclose(output, expected, atol=2e-6 * spread)
    changed = mx.where(mx.array(mask.swapaxes(-1, -2)), inputs[2], 1e6)
    unchanged = blocked_attention.attend(
        inputs[0], inputs[1], changed, scale=0.25, mask=mx.array(mask)
    )
    assert mx.array_equal(output, unchanged)


@pytest.mark.parametrize("case", ["sinks", "a mask of numbers", "half precision", "few keys"])
def test_others_are_left_to_mlx_lm(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_attention, "MIN_KEYS", 7 if case == "few keys" else 1)
    dtype = mx.bfloat16 if case == "half precision" else mx.float32
    keys = mx.zeros((1, 2, 6, 8), dtype)
    mask = mx.zeros((1, 1, 1, 6)) if case == "a mask of numbers" else None
    options = {"sinks": mx.zeros(2)} if case == "sinks" else {}
    assert not blocked_attention.pays(keys[:, :, :1], keys, keys, mask, options)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_tokens_are_those_of_mlx_lm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_attention, "BLOCK_SCORES", 200)
    cases = [Request(list(range(3, 3 + length)), 8, sampling=GREEDY) for length in (40, 33, 9)]
    expected = [reference(model_of(name), list(case.prompt), 8) for case in cases]
    engine = StepEngine(model_of(name), VOCABULARY, shapes=SMALL_BANKS)
    assert [row.tokens for row in Driver(engine, 16).play(cases)] == expected
