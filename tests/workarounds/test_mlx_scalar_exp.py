"""Powers of 2 by sums and products, where MLX's exp calls a function for each number."""

from __future__ import annotations

import platform
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.arithmetic import cpu_only
from trouper.workarounds import VARIABLE, mlx_scalar_exp
from trouper.workarounds.mlx_scalar_exp import LOWEST, MACHINE, exp2


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
    assert mlx_scalar_exp.is_needed()
    monkeypatch.setenv(VARIABLE, "mlx_scalar_exp")
    assert not mlx_scalar_exp.is_needed()


@pytest.mark.skipif(not mlx_scalar_exp.is_needed(), reason="of x86-64")
def test_it_is_still_needed() -> None:
    """MLX's library imports `fmaf`, where a compiler that may use FMA has an instruction."""
    library = Path(mx.__file__).with_name("lib") / "libmlx.so"
    assert b"\0fmaf\0" in library.read_bytes()
