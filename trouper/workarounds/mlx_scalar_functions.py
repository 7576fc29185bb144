"""MLX computes exp and erf one number at a time on a CPU that is not Apple's.

Fault: its vectors have one number there (mlx/backend/cpu/simd/base_simd.h). Compilers vectorize
sums and products in spite of that, and no functions.
Seen: MLX 0.32.4.
Upstream: https://github.com/ml-explore/mlx/pull/3019
Without: encoders make half as many texts in a second of a CPU (docs/workarounds.md).
"""

# Both functions are 1 / p(t)**n for t >= 0, with a polynomial p. All but one of its coefficients
# are positive, so that roundings do not add up, and where p**n overflows its inverse is the limit.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import factorial

import mlx.core as mx

from trouper import workarounds

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


def is_active() -> bool:
    return workarounds.is_active(__name__)


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


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None
) -> mx.array:
    """As `mx.fast.scaled_dot_product_attention`, of (rows, heads, tokens, dim) in float32. `mask`:
    Boolean; each query sees a key."""
    scores = (queries * scale) @ keys.swapaxes(-1, -2)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    weights = 1 / _power(scores.max(-1, keepdims=True) - scores, EXP, EXP_SQUARINGS)
    return (weights @ values) / weights.sum(-1, keepdims=True)


def _power(t: mx.array, coefficients: Sequence[float], squarings: int) -> mx.array:
    """p(t)**(2**squarings), with the coefficients of p from the constant on."""
    power = t * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        power = (power + coefficient) * t
    power = power + coefficients[0]
    for _ in range(squarings):
        power = mx.square(power)
    return power
