"""The error between two computations of the same logits, and its bounds.

The error of a position is the root mean square, over the vocabulary, of the difference of
log-probabilities, divided by the standard deviation of the reference's logits. 0: equal. About 1.4:
unrelated. The error does not depend on the scale of a model's logits, and one outlier among 100,000
tokens does not dominate it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.platform import device

NOISE_FACTOR = 6.0
"""Factor between the model's error against itself and the bound."""


@attrs.frozen
class Arithmetic:
    """Bounds for a dtype on a device. A smaller error than `floor` is rounding; a larger one than
    `ceiling` is none."""

    floor: float
    ceiling: float
    by_median: bool = True
    """Whether the median of a row's positions counts: with coarse rounding a router takes other
    experts at some positions, but a fault of KV shows at all later ones."""

    def judged(self, error: mx.array, owners: Sequence[int]) -> float:
        """Reduce errors (n,) to that of the worst row. owners: the row of each position. Waits for
        the device."""
        found = np.array(error, np.float64)
        if not self.by_median or np.isinf(found).any():
            return float(found.max())
        owner_of = np.array(owners)
        return max(float(np.median(found[owner_of == owner])) for owner in set(owners))

    def bound(self, noise: float) -> float:
        """Compute the bound of a correct row's error from the model's error against itself."""
        return min(max(self.floor, NOISE_FACTOR * noise), self.ceiling)


FLOAT32 = Arithmetic(floor=1e-4, ceiling=1e-2, by_median=False)
"""24 bits of mantissa: tiny models differ from themselves by 8e-7 to 3e-5."""
TENSOR_FLOAT32 = Arithmetic(floor=1e-2, ceiling=0.1)
"""11 bits of mantissa in the factors of some products."""
FLOAT16 = Arithmetic(floor=8e-3, ceiling=0.15)
BFLOAT16 = Arithmetic(floor=3e-2, ceiling=0.3)
"""8 bits of mantissa."""
ROUTED_CEILING = 0.5
"""Ceiling for routed models with coarse arithmetic: random weights in the shape of gpt-oss-20b
differ by 0.09 to 0.23."""
KV_FLOORS = {8: 3e-2, 4: 0.3}
"""Floors with quantized KV, by bits: the step of a group."""


def arithmetic_of(model: nn.Module, kv: KvFormat) -> Arithmetic:
    """Choose the bounds for a model's dtypes, KV format and device."""
    dtypes = {
        array.dtype
        for _, array in tree_flatten(model.parameters())
        if mx.issubdtype(array.dtype, mx.floating)
    }
    if mx.bfloat16 in dtypes:
        plain = BFLOAT16
    elif mx.float16 in dtypes:
        plain = FLOAT16
    else:
        plain = TENSOR_FLOAT32 if device.rounds_factors() else FLOAT32
    if plain is not FLOAT32 and is_routed(model):
        plain = attrs.evolve(plain, ceiling=ROUTED_CEILING)
    floor = max(plain.floor, KV_FLOORS.get(kv.bits, 0.0))
    return Arithmetic(floor, max(plain.ceiling, 2 * floor), plain.by_median)


def is_routed(model: nn.Module) -> bool:
    return any(
        isinstance(module, SwitchLinear | QuantizedSwitchLinear)
        for _, module in model.named_modules()
    )


def errors(logits: mx.array, reference: mx.array) -> mx.array:
    """Compute errors (n,) float32 of logits (n, vocabulary). Infinite where one of the two is
    finite. Lazy."""
    computed, expected = logits.astype(mx.float32), reference.astype(mx.float32)
    known = mx.isfinite(expected)
    count = mx.maximum(known.sum(-1), 1)
    zeros = mx.zeros_like(expected)
    difference = mx.where(known, _logprobs(computed) - _logprobs(expected), zeros)
    mean = mx.where(known, expected, zeros).sum(-1, keepdims=True) / count[:, None]
    variance = mx.where(known, mx.square(expected - mean), zeros).sum(-1) / count
    error = mx.sqrt(mx.square(difference).sum(-1) / count) / mx.maximum(mx.sqrt(variance), 1e-12)
    sound = mx.all(mx.isfinite(computed) == known, axis=-1) & mx.isfinite(error)
    return mx.where(sound, error, mx.inf)


def _logprobs(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, -1, keepdims=True)


def worst(error: mx.array) -> float:
    """Return the largest error. Waits for the device."""
    return float(error.max().item())  # type: ignore[arg-type]
