"""Functions of a CPU by sums and products are those of MLX and of exact arithmetic."""

from __future__ import annotations

import platform
from collections.abc import Callable
from math import erfc, exp, sqrt
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.arithmetic import cpu_only
from trouper.workarounds import VARIABLE, mlx_scalar_functions
from trouper.workarounds.mlx_scalar_functions import LOWEST, MACHINE, exp2, gelu, silu

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


@cpu_only
def test_powers_are_right() -> None:
    exponents = np.linspace(LOWEST, 127, 30_011, dtype=np.float32)
    powers = np.array(exp2(mx.array(exponents)), np.float64)
    assert np.abs(powers / np.exp2(exponents.astype(np.float64)) - 1).max() < 3e-7


@cpu_only
def test_whole_exponents_are_nearly_exact_and_odd_ones_are_no_numbers_made_up() -> None:
    powers = np.array(exp2(mx.array([0.0, 1.0, 10.0, -mx.inf, -1e30, mx.nan]))).tolist()
    assert powers[:3] == pytest.approx([1, 2, 1024], rel=2e-7)
    assert powers[3:5] == pytest.approx([2**LOWEST] * 2, rel=2e-7)
    assert np.isnan(powers[5])


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: MACHINE)
    assert mlx_scalar_functions.is_needed()
    monkeypatch.setenv(VARIABLE, "mlx_scalar_functions")
    assert not mlx_scalar_functions.is_needed()


@pytest.mark.skipif(not mlx_scalar_functions.is_needed(), reason="of x86-64")
def test_it_is_still_needed() -> None:
    """MLX has vectors for Apple's CPUs alone: a wheel brings its headers. Its library imports
    `fmaf`, where a compiler that may use FMA has an instruction."""
    package = Path(mx.__file__).parent
    vectors = {file.name for file in (package / "include/mlx/backend/cpu/simd").glob("*simd.h")}
    own = {"simd.h", "base_simd.h"}
    assert vectors - own == {"accelerate_simd.h", "accelerate_fp16_simd.h", "neon_fp16_simd.h"}
    assert b"\0fmaf\0" in (package / "lib/libmlx.so").read_bytes()
