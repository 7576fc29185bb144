"""The samplers beside OpenAI's: a request without them costs nothing, and one with any has it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from trouper.protocol.sampling import Sampling
from trouper.web.openai.parameters import FurtherSampling, with_further


def test_defaults_of_requests_are_those_of_rows() -> None:
    """So that without any of them there is nothing to change."""
    plain = Sampling(temperature=0.5)
    assert with_further(plain, FurtherSampling()) == plain
    for name in FurtherSampling.__struct_fields__:
        own = getattr(FurtherSampling(), name)
        assert name == "dry_sequence_breakers" or own == getattr(plain, name)


@pytest.mark.parametrize(
    ("name", "value", "is_then"),
    [
        ("top_n_sigma", 1.5, 1.5),
        ("top_n_sigma", -1, 0.0),
        ("typical_p", 0.9, 0.9),
        ("xtc_probability", 0.5, 0.5),
        ("xtc_threshold", 0.2, 0.2),
        ("dry_multiplier", 0.8, 0.8),
        ("dry_base", 2.0, 2.0),
        ("dry_allowed_length", 3, 3),
        ("dry_penalty_last_n", 64, 64),
        ("dry_sequence_breakers", ("x",), ("x",)),
    ],
)
def test_one_of_them_is_taken(name: str, value: Any, is_then: Any) -> None:
    plain = Sampling(temperature=0.5)
    assert with_further(plain, FurtherSampling(**{name: value})) == attrs.evolve(
        plain, **{name: is_then}
    )
