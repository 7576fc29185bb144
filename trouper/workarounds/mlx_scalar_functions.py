"""MLX computes exp and erf one number at a time on an x86-64 CPU.

Fault: its vectors have one number there (mlx/backend/cpu/simd/base_simd.h), and `std::fma` of
`simd::exp` calls libm six times, since the wheel is built for any x86-64: 11 ns a number. Compilers
vectorize sums and products in spite of that: 0.2 ns.
Seen: MLX 0.32.4.
Upstream: https://github.com/ml-explore/mlx/pull/3019
Without: softmax takes half of attention's time on a CPU, and encoders make half as many texts in a
second (docs/workarounds.md).
"""

# Both activations are 1 / p(t)**n for t >= 0, with a polynomial p. All but one of its coefficients
# are positive, so that roundings do not add up, and where p**n overflows its inverse is the limit.

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from math import factorial

import mlx.core as mx

from trouper import workarounds

MACHINE = "x86_64"
LOWEST = -126.0
"""The exponent of the smallest normal number."""
ROUNDER, BIAS, MANTISSA_BITS = 1.5 * 2**23, 127, 23
COEFFICIENTS = (
    1.0000000710297,
    0.6931469491610642,
    0.24022121753561695,
    0.05550742616002217,
    0.00967545974551571,
    0.0013266970386249426,
)
"""Of 2**f for -0.5 <= f <= 0.5: least squares at Chebyshev nodes, relative error 8e-8."""

# p(t)**16 is exp(t), by Taylor's series of exp(t / 16).
EXP, EXP_SQUARINGS = [16.0**-power / factorial(power) for power in range(7)], 4

# p(t)**8 is 1 / (1 - Phi(t)), with the normal distribution Phi. Minimax fit of p on [0, 6], of the
# error that 1 / p**8 makes in gelu: 2e-9.
TAIL_SQUARINGS = 3
TAIL = [
    2 ** (1 / 8) * coefficient
    for coefficient in (
        1.0,
        9.9734908e-2,
        4.4772131e-2,
        8.6354681e-3,
        9.2293716e-4,
        1.5321113e-4,
        8.0678304e-5,
        -1.3201933e-5,
        2.6328798e-6,
    )
]


def is_needed() -> bool:
    return platform.machine() == MACHINE and workarounds.is_active(__name__)


def exp2(exponents: mx.array) -> mx.array:
    """2 to the power of `exponents` (float32, at most 127), with a relative error of 3e-7. NaN
    stays, and less than -126 counts as -126."""
    exponents = mx.maximum(exponents, LOWEST)
    # A sum of this size has no bits for fractions: it is rounded, and its last bits are the number.
    rounded = exponents + ROUNDER
    fraction = exponents - (rounded - ROUNDER)
    power = fraction * COEFFICIENTS[-1] + COEFFICIENTS[-2]
    for coefficient in COEFFICIENTS[-3::-1]:
        power = power * fraction + coefficient
    bits = (rounded.view(mx.int32) + BIAS) << MANTISSA_BITS
    return power * bits.view(mx.float32)


def gelu(x: mx.array) -> mx.array:
    """x * Phi(x), float32, within 1.2e-7 * (1 + 2 * abs(x)) as `mlx.nn.gelu` is."""
    distance = mx.abs(x)
    return mx.maximum(x, 0) - distance / _power(distance, TAIL, TAIL_SQUARINGS)


def silu(x: mx.array) -> mx.array:
    """x / (1 + exp(-x)), float32, as near as `gelu`."""
    small = 1 / _power(mx.abs(x), EXP, EXP_SQUARINGS)
    return x * mx.where(x < 0, small, 1) / (1 + small)


FUNCTIONS: Mapping[str, Callable[[mx.array], mx.array]] = {"gelu": gelu, "silu": silu}
"""By transformers' names."""


def _power(t: mx.array, coefficients: Sequence[float], squarings: int) -> mx.array:
    """p(t)**(2**squarings), with the coefficients of p from the constant on."""
    power = t * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        power = (power + coefficient) * t
    power = power + coefficients[0]
    for _ in range(squarings):
        power = mx.square(power)
    return power
