"""Seeds of requests. Randomness enters here, as data."""

from __future__ import annotations

import secrets

import attrs

from trouper.protocol.requests import Generate

SEED_STRIDE = 0x9E3779B97F4A7C15
"""Difference of two choices' seeds: odd, for many different seeds; 2^64 over the golden ratio."""


def drawn_seed(requested: int | None, default: int | None) -> int:
    if requested is not None:
        return requested
    return default if default is not None else secrets.randbits(63)


def choices_of(generate: Generate, count: int) -> tuple[Generate, ...]:
    """Repeat the request with the seed and derived seeds. The common prompt is prefilled once."""
    if count == 1 and 0 <= generate.sampling.seed < 2**64:
        return (generate,)
    return tuple(
        attrs.evolve(
            generate,
            request_id=f"{generate.request_id}-{index}" if index else generate.request_id,
            sampling=attrs.evolve(
                generate.sampling, seed=(generate.sampling.seed + index * SEED_STRIDE) % 2**64
            ),
        )
        for index in range(count)
    )
