"""llama.cpp's samplers, by llama.cpp's names: typical_p, XTC and DRY."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import attrs
from msgspec import Meta, structs

from trouper.protocol.sampling import SEQUENCE_BREAKERS, Sampling
from trouper.web.http.field_types import HUGE, Share
from trouper.web.http.request_body import Body

MAX_BREAKERS = 16
Breaker = Annotated[str, Meta(min_length=1, max_length=40)]
"""Maximum length of llama.cpp."""


class FurtherSampling(Body, kw_only=True, frozen=True):
    typical_p: Share = 1.0
    xtc_probability: Share = 0.0
    xtc_threshold: Share = 0.1
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] = 0.0
    dry_base: Annotated[float, Meta(ge=1, le=100)] = 1.75
    dry_allowed_length: Annotated[int, Meta(ge=1, le=2**20)] = 2
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=HUGE)] = -1
    dry_sequence_breakers: Annotated[tuple[Breaker, ...], Meta(max_length=MAX_BREAKERS)] | None = (
        None
    )


OFF = tuple((field.name, field.default) for field in structs.fields(FurtherSampling))
"""Values of a request without these samplers."""


def with_further(sampling: Sampling, request: FurtherSampling) -> Sampling:
    if all(getattr(request, name) == default for name, default in OFF):
        return sampling
    return attrs.evolve(
        sampling,
        typical_p=request.typical_p,
        xtc_probability=request.xtc_probability,
        xtc_threshold=request.xtc_threshold,
        dry_multiplier=request.dry_multiplier,
        dry_base=request.dry_base,
        dry_allowed_length=request.dry_allowed_length,
        dry_penalty_last_n=min(request.dry_penalty_last_n, 2**30),
        dry_sequence_breakers=_breakers(request.dry_sequence_breakers),
    )


def _breakers(given: Sequence[str] | None) -> tuple[str, ...]:
    return SEQUENCE_BREAKERS if given is None else tuple(dict.fromkeys(given))
