from __future__ import annotations

import attrs

# Temperature below which sampling is greedy. There the strongest noise moves logits by 2e-4, as
# rounding does, and division by still smaller values overflows.
COLDEST = 1e-5
# llama.cpp's default.
SEQUENCE_BREAKERS = ("\n", ":", '"', "*")


@attrs.frozen(kw_only=True)
class Sampling:
    """Sampling parameters of one row, constant for the row's life.

    Off: temperature < `COLDEST` (greedy), top_k 0, top_p 1, min_p 0, typical_p 1, xtc_probability
    0, dry_multiplier 0. `seed` keys the noise by (seed, position, token id), in any batch. presence
    and frequency penalties (OpenAI) count generated tokens, repetition (CTRL) the prompt, too.
    `logit_bias` comes first.

    typical_p, XTC and DRY as in llama.cpp. XTC: in a share `xtc_probability` of draws, of the
    tokens with at least `xtc_threshold` only the least likely stays. DRY: a token that continues a
    repetition of n >= dry_allowed_length tokens loses dry_multiplier * dry_base ** (n -
    dry_allowed_length); `dry_sequence_breakers` and the last `dry_penalty_last_n` tokens (-1: all)
    bound repetitions."""

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
        """Whether the likeliest token is chosen, the first of equal ones."""
        return self.temperature < COLDEST or (self.top_p == 0 and self.typical_p >= 1)

    @property
    def penalized(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (
            1.0,
            0.0,
            0.0,
        )

    @property
    def dry(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0
