"""Reference logits: the model's own code, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from trouper.engine.self_check.accuracy import Arithmetic, errors, worst

Tokens = Sequence[int]
ODD = (7, 1, 3, 5)
"""Sizes of chunks that no kernel prefers."""


class ModelRun(Protocol):
    def __call__(self, tokens: Tokens, parts: Sequence[int], /) -> mx.array:
        """Compute logits (tokens, vocabulary) of one row, fed in chunks of `parts` tokens."""


class WrongAloneError(Exception):
    """The model's own code is wrong for one row. The message is one line."""


def run_alone(model: nn.Module) -> ModelRun:
    """Make a function that runs the model with mlx-lm's caches."""

    def run(tokens: Tokens, parts: Sequence[int]) -> mx.array:
        cache, at, logits = make_prompt_cache(model), 0, []
        for part in parts:
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
        position; with coarse arithmetic also token by token, which may use other kernels."""
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
    """Draw tokens from the lower half of the vocabulary: the upper end may be padding."""
    random = np.random.RandomState(seed)
    return [random.randint(1, max(vocabulary // 2, 2), length).tolist() for length in lengths]
