"""What counts as rounding, and what does not."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.families import build
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.platform import device
from trouper.engine.self_check.accuracy import (
    BFLOAT16,
    FLOAT32,
    ROUTED_CEILING,
    TENSOR_FLOAT32,
    arithmetic_of,
    errors,
    is_routed,
)


def test_equal_logits_have_no_error_whatever_is_added_to_all() -> None:
    logits = mx.random.normal((3, 100), key=mx.random.key(1))
    assert mx.allclose(errors(logits + 7, logits), mx.zeros(3), atol=1e-5)


def test_unrelated_logits_are_as_far_apart_as_can_be() -> None:
    one, two = (5 * mx.random.normal((4, 10_000), key=mx.random.key(seed)) for seed in (1, 2))
    assert mx.allclose(errors(one, two), mx.full((4,), 2**0.5), atol=0.1)


def test_the_scale_of_logits_does_not_matter() -> None:
    logits = mx.random.normal((2, 1000), key=mx.random.key(1))
    noise = 1e-3 * mx.random.normal((2, 1000), key=mx.random.key(2))
    one, nine = errors(logits + noise, logits), errors(9 * (logits + noise), 9 * logits)
    assert mx.allclose(one, nine, rtol=1), (
        "but for what the most likely token makes of the sum of all"
    )


@pytest.mark.parametrize("wrong", [mx.nan, mx.inf, -mx.inf])
def test_what_is_no_number_is_no_rounding(wrong: float) -> None:
    logits = mx.zeros((2, 8)) + mx.arange(8)
    broken = mx.concatenate([logits[:1], mx.full((1, 8), wrong)])
    assert errors(broken, logits).tolist() == [0, mx.inf]


def test_tokens_that_a_model_never_says_are_left_out() -> None:
    never = mx.where(mx.arange(8) < 2, -mx.inf, mx.arange(8))[None]
    assert errors(never, never).tolist() == [0]
    assert errors(mx.arange(8)[None] * 1.0, never).tolist() == [mx.inf]


def test_where_rounding_is_coarse_a_row_is_as_wrong_as_most_of_it() -> None:
    apart, owners = mx.array([0.01, 0.9, 0.02, 0.5, 0.6, 0.7]), [0, 0, 0, 1, 1, 1]
    assert FLOAT32.judged(apart, owners) == pytest.approx(0.9)
    assert BFLOAT16.judged(apart, owners) == pytest.approx(0.6)
    assert BFLOAT16.judged(mx.array([0.0, 0.0, mx.inf]), [0, 0, 0]) == mx.inf


def test_the_bound_follows_the_noise_within_limits() -> None:
    assert FLOAT32.bound(0.0) == FLOAT32.floor
    assert TENSOR_FLOAT32.bound(5e-3) == pytest.approx(3e-2)
    assert BFLOAT16.bound(1.0) == BFLOAT16.ceiling


def test_routers_that_round_differently_are_allowed_for() -> None:
    plain, routed = build("llama"), build("qwen3_moe")
    for model in (plain, routed):
        model.set_dtype(mx.bfloat16)
    assert arithmetic_of(plain, PLAIN) == BFLOAT16
    assert arithmetic_of(routed, PLAIN).ceiling == ROUTED_CEILING > BFLOAT16.ceiling
    exact = not device.rounds_factors()
    assert (arithmetic_of(build("qwen3_moe"), PLAIN) == FLOAT32) == exact


def test_experts_of_mlx_vlm_are_routed_too() -> None:
    layers = pytest.importorskip("mlx_vlm.models.switch_layers")
    assert is_routed(layers.SwitchGLU(8, 8, 2))
