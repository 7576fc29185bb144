"""The table of sampling parameters: name, default and bounds of each.

A new one is declared here, takes part in `engine/sampling/sampler.py`, and has its field of the
body in `web/openai/parameters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

import attrs

# Temperature below which sampling is greedy. There the strongest noise moves logits by 2e-4, as
# rounding does, and division by still smaller values overflows.
COLDEST = 1e-5
# llama.cpp's default.
SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
# The range of float32.
FINITE = 3e38
INT32 = 2**31 - 1


class Bounds(NamedTuple):
    """Values that the engine can compute with; the bodies of requests allow fewer."""

    minimum: float
    maximum: float
    integer: bool = False


def parameter(default: Any, *bounds: Any, selects: bool = False) -> Any:
    """Declare a parameter. `selects`: another value than the default selects other code of the
    engine, by which a crash is attributed."""
    metadata = {"bounds": Bounds(*bounds) if bounds else None, "selects": selects}
    return attrs.field(default=default, metadata=metadata)


@attrs.frozen(kw_only=True)
class Sampling:
    """Sampling parameters of one row, constant for the row's life. All are off by default but the
    temperature (greedy below `COLDEST`). docs/parameters.md explains each."""

    temperature: float = parameter(1.0, 0, FINITE)
    top_p: float = parameter(1.0, 0, 1, selects=True)
    top_k: int = parameter(0, 0, INT32, True, selects=True)
    min_p: float = parameter(0.0, 0, 1, selects=True)
    # Repetition counts the tokens of prompt and answer (CTRL), the others those of the answer
    # (OpenAI).
    repetition_penalty: float = parameter(1.0, 1e-30, FINITE)
    presence_penalty: float = parameter(0.0, -FINITE, FINITE)
    frequency_penalty: float = parameter(0.0, -FINITE, FINITE)
    logit_bias: tuple[tuple[int, float], ...] = parameter((), selects=True)
    # Keys the noise by (seed, position, token id), in any batch. Not drawn by default: equal
    # parameters make equal text. HTTP draws a missing seed.
    seed: int = parameter(0, -inf, inf, True)
    # Logits of at least the best minus so many standard deviations stay.
    top_n_sigma: float = parameter(0.0, 0, FINITE, selects=True)
    typical_p: float = parameter(1.0, 0, 1, selects=True)
    # In this share of draws, of the tokens with at least `xtc_threshold` only the least likely
    # stays.
    xtc_probability: float = parameter(0.0, 0, 1, selects=True)
    xtc_threshold: float = parameter(0.1, 0, 1)
    # A token that continues a repetition of n >= dry_allowed_length tokens loses dry_multiplier *
    # dry_base ** (n - dry_allowed_length). Breakers and the last `dry_penalty_last_n` tokens (-1:
    # all) bound repetitions.
    dry_multiplier: float = parameter(0.0, 0, FINITE)
    dry_base: float = parameter(1.75, 0, FINITE)
    dry_allowed_length: int = parameter(2, 1, INT32, True)
    dry_penalty_last_n: int = parameter(-1, -1, INT32, True)
    dry_sequence_breakers: tuple[str, ...] = parameter(SEQUENCE_BREAKERS)

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

    @property
    def code_path(self) -> tuple[bool, ...]:
        """Which code of the engine samples the row; the same for other values and seeds."""
        selected = (getattr(self, name) != default for name, default in SELECTING)
        return (self.greedy, self.penalized, self.dry, *selected)


MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters whose default a model may set in its generation_config.json, as in vLLM."""


@attrs.frozen
class SamplingDefaults:
    """Values for parameters that a request leaves open. Without a seed each request draws one."""

    seed: int | None = None
    of_model: tuple[tuple[str, float], ...] = ()

    def fill(self, sampling: Sampling, **requested: float | None) -> Sampling:
        """Set the requested parameters; the model's defaults and then ours stand for None."""
        named: dict[str, Any] = {
            name: value for name, value in requested.items() if value is not None
        }
        return attrs.evolve(sampling, **(dict[str, Any](self.of_model) | named))


def bounds_of_parameters() -> Iterator[tuple[str, Bounds]]:
    for field in attrs.fields(Sampling):
        if field.metadata["bounds"] is not None:
            yield field.name, field.metadata["bounds"]


SELECTING = tuple(
    (field.name, field.default) for field in attrs.fields(Sampling) if field.metadata["selects"]
)
