"""The error between two computations of the same logits, and its bounds: the root mean square, over
the vocabulary, of the difference of log-probabilities, divided by the standard deviation of the
reference's logits. About 1.4: unrelated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.passes.seams import exchanging
from trouper.engine.platform import device
from trouper.workarounds.mlx_sorted_experts import is_expert_layer

# This error does not depend on the scale of a model's logits, and one outlier among 100,000 tokens
# does not dominate it.

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


# 24 bits of mantissa: tiny models differ from themselves by 8e-7 to 3e-5.
FLOAT32 = Arithmetic(floor=1e-4, ceiling=1e-2, by_median=False)

# 11 bits of mantissa in the factors of some products.
TENSOR_FLOAT32 = Arithmetic(floor=1e-2, ceiling=0.1)
FLOAT16 = Arithmetic(floor=8e-3, ceiling=0.15)
BFLOAT16 = Arithmetic(floor=3e-2, ceiling=0.3)  # 8 bits of mantissa.

# Ceiling for routed models with coarse arithmetic: random weights in the shape of gpt-oss-20b
# differ by 0.09 to 0.23.
ROUTED_CEILING = 0.5
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
    return any(is_expert_layer(module) for _, module in model.named_modules())


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


def described(difference: float, bound: float) -> str:
    return (
        f"log-probabilities by {difference:.2g} of the logits' spread, where rounding makes up to "
        f"{bound:.2g}"
    )


def _logprobs(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, -1, keepdims=True)


def worst(error: mx.array) -> float:
    """Waits for the device."""
    return float(error.max().item())  # type: ignore[arg-type]


Tokens = Sequence[int]
ODD = (7, 1, 3, 5)
"""Sizes of chunks that no kernel prefers."""


ModelRun = Callable[[Tokens, Sequence[int]], mx.array]
"""From one row's tokens, and the sizes of chunks, to logits (tokens, vocabulary)."""


class WrongAloneError(Exception):
    """The message is one line."""


def run_alone(model: nn.Module) -> ModelRun:
    """Make a function that runs the model, adapted as its rows are, with mlx-lm's caches."""
    adapted(model)

    def run(tokens: Tokens, parts: Sequence[int]) -> mx.array:
        cache, at, logits = make_prompt_cache(model), 0, []
        for part in parts:
            with exchanging(model):
                logits.append(model(mx.array([tokens[at : at + part]]), cache=cache)[0])
            mx.async_eval(logits[-1])
            at += part
        return mx.concatenate(logits)

    return run


def cut(count: int, sizes: Sequence[int]) -> list[int]:
    """Cut `count` tokens into chunks of these sizes, repeated in order."""
    parts: list[int] = []
    while (remaining := count - sum(parts)) > 0:
        parts.append(min(sizes[len(parts) % len(sizes)], remaining))
    return parts


class Reference:
    """Logits of each text by `run`, and the error of `run` against itself in other chunks (noise).
    A text is a prompt and `singles` single tokens."""

    def __init__(
        self,
        run: ModelRun,
        texts: Sequence[Tokens],
        arithmetic: Arithmetic,
        singles: int,
        odd: Sequence[int] = ODD,
    ) -> None:
        self._run, self.arithmetic, self._singles, self._odd = run, arithmetic, singles, odd
        self.texts = texts
        self._logits = [run(text, self._parts(text)) for text in texts]
        self._runs: dict[tuple[int, tuple[int, ...]], mx.array] = {}
        self._require_finite()
        self.noise, worst_noise = self._noise()
        self.consistent = self.noise <= arithmetic.ceiling
        self._chunks_matter = worst_noise > arithmetic.ceiling

    @property
    def bound(self) -> float:
        """Error below which a row equals the reference."""
        return self.arithmetic.bound(self.noise if self.consistent else 0.0)

    def logits(self, text: int, parts: Sequence[int]) -> mx.array:
        """Reference logits (tokens, vocabulary) of a text, fed in these parts, or of the
        beginning."""
        if not self._chunks_matter:
            return self._logits[text]
        key = text, tuple(parts)
        if key not in self._runs:
            self._runs[key] = self._run(self.texts[text], parts)
        return self._runs[key]

    def _parts(self, text: Tokens) -> list[int]:
        prompt = max(len(text) - self._singles, 1)
        return [prompt, *[1] * (len(text) - prompt)]

    def _require_finite(self) -> None:
        sound = mx.stack(
            [mx.all(~mx.isnan(logits)) & mx.any(mx.isfinite(logits)) for logits in self._logits]
        )
        if not bool(mx.all(sound).item()):
            raise WrongAloneError("its own code gives logits that are not numbers")

    def _noise(self) -> tuple[float, float]:
        """Return the error of the first text in odd chunks, as rows are judged and at the worst
        position."""
        # With coarse arithmetic also token by token, which may use other kernels.
        text = self.texts[0]
        ways = [
            cut(len(text), self._odd),
            *([[1] * len(text)] if self.arithmetic.by_median else []),
        ]
        noise = [errors(self._run(text, parts), self._logits[0]) for parts in ways]
        return max(self.arithmetic.judged(error, [0] * len(error)) for error in noise), max(
            map(worst, noise)
        )


def random_texts(lengths: Sequence[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Draw tokens from the lower half of the vocabulary, without padding."""
    random = np.random.RandomState(seed)
    return [random.randint(1, max(vocabulary // 2, 2), length).tolist() for length in lengths]
