"""Attention of short prompts in company, beside MLX's own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.engine.driver import Driver, Request
from tests.families import build, reference
from tests.family_configs import VOCABULARY
from trouper.engine.kv import attention_seam
from trouper.engine.kv.unfused_attention import MAX_SCORES, attend, pays
from trouper.engine.passes.pass_shapes import ROUNDED
from trouper.engine.platform import device
from trouper.engine.step import StepEngine

ROWS, WIDTH, TOKENS, DIM = 3, 5, 12, 16


def inputs(heads: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(heads)
    shapes = (ROWS, heads, WIDTH, DIM), (ROWS, 2, TOKENS, DIM), (ROWS, 2, TOKENS, 8)
    queries, keys, values = (mx.random.normal(shape).astype(dtype) for shape in shapes)
    return queries, keys, values


def masks() -> dict[str, Any]:
    some = mx.random.uniform(shape=(ROWS, 1, WIDTH, TOKENS)) < 0.5
    some[..., 0] = True
    return {
        "none": None,
        "causal": "causal",
        "bool": some,
        "added": mx.where(some, 0.0, -1e9),
        "of all rows": some[0, 0],
    }


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("heads", [2, 6])
def test_it_is_mlx_s_attention(heads: int, name: str) -> None:
    mask = masks()[name]
    queries, keys, values = inputs(heads, mx.float32)
    ours = attend(queries, keys, values, 0.25, mask)
    mlx = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=mask)
    assert float(mx.abs(ours - mlx).max()) < 1e-5


def test_16_bits_lose_no_more_than_a_fused_kernel_s() -> None:
    """Scores of 16 bits would lose a hundredth."""
    queries, keys, values = inputs(6, mx.bfloat16)
    wide = [array.astype(mx.float32) for array in (queries, keys, values)]
    exact = attend(wide[0], wide[1], wide[2], 3.0, "causal")
    ours = attend(queries, keys, values, 3.0, "causal")
    assert ours.dtype == mx.bfloat16
    assert float(mx.abs(ours - exact).max()) < 0.02


def test_it_is_for_short_rows_of_16_bits_on_a_device_that_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries, keys, _ = inputs(6, mx.bfloat16)
    assert not pays(queries, keys, {})
    monkeypatch.setattr(device, "prepares_shapes", lambda: True)
    assert pays(queries, keys, {})
    assert not pays(queries, keys, {"sinks": mx.zeros(6)})
    assert not pays(queries.astype(mx.float32), keys, {})
    assert not pays(queries[:1], keys[:1], {}), "a lone prompt's shapes recur"
    assert not pays(queries[:, :, :1], keys, {}), "decoding has kernels"
    assert not pays(queries, (keys, keys, keys), {}), "quantized"
    long = mx.broadcast_to(keys[:, :, :1], (ROWS, 2, MAX_SCORES // (ROWS * WIDTH), DIM))
    assert not pays(queries, long, {})


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "jamba"])
def test_a_burst_answers_as_ever(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In float32, where it is not used else, so that tokens can be compared."""
    calls = []

    def noted(queries: mx.array, *args: Any) -> mx.array:
        calls.append(queries.shape)
        return attend(queries, *args)

    monkeypatch.setattr(attention_seam, "attend_unfused", noted)
    monkeypatch.setattr(attention_seam, "pays", lambda queries, *_: min(queries.shape[::2]) > 1)
    model = build(name)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15, 16, 17, 18, 19]]
    engine = StepEngine(model, VOCABULARY, shapes=ROUNDED)
    rows = Driver(engine, 4).play([Request(prompt, 6) for prompt in prompts])
    assert [row.tokens for row in rows] == [reference(model, prompt, 6) for prompt in prompts]
    assert calls or not engine.capabilities.allows("prefill_together")
