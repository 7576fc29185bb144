"""Sampling parameters of one row."""

from __future__ import annotations

import attrs

COLDEST = 1e-5
"""Temperature below which sampling is greedy. There the strongest noise moves logits by 2e-4, as much as rounding does, and
still smaller values leave the range in which floats can be divided by them."""


@attrs.frozen(kw_only=True)
class Sampling:
    """One row's own sampling parameters; validated at the edge, constant for the row's life.

    temperature 0 is greedy, and so is less than `COLDEST`. top_k 0 and top_p 1 and min_p 0 are off. `seed` keys the noise by
    (seed, position, token id), so a row draws the same tokens alone and in any batch.
    Penalties follow OpenAI (presence, frequency: over generated tokens) and the CTRL paper
    (repetition: over prompt and generated tokens). `logit_bias` is added before everything else.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST

    @property
    def penalized(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
