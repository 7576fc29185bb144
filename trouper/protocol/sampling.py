"""Sampling parameters of one row."""

from __future__ import annotations

import attrs

COLDEST = 1e-5
"""Temperature below which sampling is greedy. There the strongest noise moves logits by 2e-4, as
much as rounding does, and still smaller values leave the range in which floats can be divided by
them."""
SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's default of `dry_sequence_breakers`."""


@attrs.frozen(kw_only=True)
class Sampling:
    """One row's own sampling parameters; validated at the edge, constant for the row's life.

    temperature 0 is greedy, and so is less than `COLDEST`. top_k 0 and top_p 1 and min_p 0 are off.
    `seed` keys the noise by (seed, position, token id), so a row draws the same tokens alone and in
    any batch. Penalties follow OpenAI (presence, frequency: over generated tokens) and the CTRL
    paper (repetition: over prompt and generated tokens). `logit_bias` is added before everything
    else.

    typical_p 1, xtc_probability 0 and dry_multiplier 0 are off; names and defaults are llama.cpp's.
    With XTC, in a share `xtc_probability` of the draws all tokens of at least `xtc_threshold` are
    dropped but the least likely of them. DRY ("don't repeat yourself") takes dry_multiplier *
    dry_base ** (n - dry_allowed_length) off the logit of a token that would continue a repetition
    of n tokens of prompt or answer, n at least dry_allowed_length; no repetition goes across one of
    `dry_sequence_breakers`, or back beyond the last `dry_penalty_last_n` tokens (-1: all).
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
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = SEQUENCE_BREAKERS

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST

    @property
    def penalized(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (
            1.0,
            0.0,
            0.0,
        )

    @property
    def dry(self) -> bool:
        """Whether DRY changes anything."""
        return self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0
