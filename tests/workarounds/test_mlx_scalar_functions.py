"""Functions of a CPU by sums and products are those of MLX and of exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from math import erfc, exp, sqrt
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.arithmetic import TF32
from trouper.workarounds import mlx_scalar_functions
from trouper.workarounds.mlx_scalar_functions import attention, gelu, silu

X = np.linspace(-40, 40, 8001, dtype=np.float32)
FAR = [-1e30, -1e4, 1e4, 1e30]


def exact_gelu(x: float) -> float:
    return x * erfc(-x / sqrt(2)) / 2


def exact_silu(x: float) -> float:
    return x / (1 + exp(-x)) if x > -700 else 0.0


@pytest.mark.parametrize(("function", "exact"), [(gelu, exact_gelu), (silu, exact_silu)])
def test_activations(
    function: Callable[[mx.array], mx.array], exact: Callable[[float], float]
) -> None:
    off = np.abs(np.array(function(mx.array(X))) - [exact(float(x)) for x in X])
    assert (off <= 1.2e-7 * (1 + 2 * np.abs(X))).all()
    assert function(mx.array(FAR)).tolist() == mx.array([0, 0, 1e4, 1e30]).tolist()


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_attention(spread: float) -> None:
    """Also of scores that lie far apart; rows with padding, which weighs nothing."""
    random = np.random.default_rng(0)
    queries, keys, values = (random.standard_normal((2, 3, 20, 16)) for _ in range(3))
    queries *= spread
    mask = np.arange(20) < np.array([20, 11])[:, None, None, None]
    scores = np.where(mask, queries @ keys.swapaxes(-1, -2) / 4, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ values
    inputs = [mx.array(each.astype(np.float32)) for each in (queries, keys, values)]
    output = attention(*inputs, scale=0.25, mask=mx.array(mask))
    # Rounded scores of 100 differ by 1e-5.
    np.testing.assert_allclose(output, expected, atol=1e-1 if TF32 else 2e-6 * spread)
    changed = mx.where(mx.array(mask.swapaxes(-1, -2)), inputs[2], 1e6)
    unchanged = attention(inputs[0], inputs[1], changed, scale=0.25, mask=mx.array(mask))
    assert mx.array_equal(output, unchanged)


def test_it_is_still_needed() -> None:
    """MLX has vectors for Apple's CPUs alone: a wheel brings its headers."""
    [package] = mx.__spec__.submodule_search_locations or [str(Path(mx.__file__).parent)]
    headers = Path(package) / "include/mlx/backend/cpu/simd"
    vectors = {file.name for file in headers.glob("*simd.h")} - {"simd.h", "base_simd.h"}
    assert vectors == {"accelerate_simd.h", "accelerate_fp16_simd.h", "neon_fp16_simd.h"}
    assert mlx_scalar_functions.is_active()
