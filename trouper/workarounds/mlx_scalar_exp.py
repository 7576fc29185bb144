"""MLX calls a function of libm six times for each exp of an x86-64 CPU.

Fault: the wheel is built for any x86-64, where `std::fma` of `simd::exp`
(mlx/backend/cpu/simd/math.h) is a call: 11 ns a number. Sums and products take 0.2.
Seen: MLX 0.32.4.
Upstream: no report was found in November 2026.
Without: softmax takes half of attention's time on a CPU.
"""

from __future__ import annotations

import platform

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
