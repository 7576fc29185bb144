"""What a float32 matmul rounds to on the device at hand, and how far two right answers may
therefore be apart.

A CPU multiplies float32 as it is. NVIDIA's tensor cores round each factor to TF32 (11 bits) unless
`MLX_ENABLE_TF32=0`. With full float32 a test compares tokens for equality. With TF32 two right
answers may part where the model hardly prefers one token: there a test demands that
log-probabilities agree within `CLOSE`, and tokens wherever the wanted one leads by more than
`CERTAIN`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from mlx import nn

from tests.engine import naive
from trouper.engine.platform import device
from trouper.protocol.sampling import Sampling

EXACT_CLOSE = 5e-4
"""Log-probabilities of one prompt in other chunks or other company differ by 1e-4 at most."""
TF32_CLOSE, TF32_CERTAIN = 0.1, 0.05
"""Of the tiny models in tests/families.py, whose logits spread over about ten. With factors rounded
to TF32 on a CPU, wherever a pass has more than one token, no answer of a model without a router
departed where the wanted token led by more than 0.02."""
ROUTER = "TF32: a router may choose another of two nearly equal experts, and with it another answer"


TF32 = device.rounds_factors()
CLOSE = TF32_CLOSE if TF32 else EXACT_CLOSE
CERTAIN = TF32_CERTAIN if TF32 else 0.0
"""In logits, or in scores of a draw: scaled logits plus noise."""


full_float32 = pytest.mark.skipif(
    TF32, reason="shown in full float32: in TF32 some faults are as small as rounding"
)


def _on_a_cpu(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not device.is_cpu(), reason=reason)


cpu_only = _on_a_cpu("about what only a CPU does: it computes in float32, row by row")
releases_late = _on_a_cpu(
    "about a CPU: a GPU holds what a step reads until it has run, so that a write of the next step "
    "may copy"
)


def skip_if_routed(config: Mapping[str, Any]) -> None:
    """Skip a test of a model with experts where arithmetic is TF32."""
    if TF32 and any("expert" in key for key in keys_of(config)):
        pytest.skip(ROUTER)


def keys_of(config: Mapping[str, Any]) -> Iterator[str]:
    """Names at every level of a config."""
    for key, value in config.items():
        yield key
        if isinstance(value, Mapping):
            yield from keys_of(value)


def assert_tokens(  # noqa: PLR0917  One answer, what it should be, and what it answers.
    model: nn.Module,
    prompt: Sequence[int],
    sampling: Sampling,
    got: Sequence[int],
    wanted: Sequence[int],
    told: object = "",
) -> None:
    """`got` is `wanted`, or departs from it first at a token that rounding may change. Either may
    be a beginning of the other."""
    place = next(
        (place for place, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]),
        None,
    )
    if place is None:
        return
    lead = 0.0 if not TF32 else lead_of(model, prompt, sampling, wanted[: place + 1], got[place])
    assert TF32 and lead <= CERTAIN, (
        f"token {place}: {got[place]} where {wanted[place]} is right by {lead:.4g} ({told})"
    )


def lead_of(
    model: nn.Module, prompt: Sequence[int], sampling: Sampling, wanted: Sequence[int], other: int
) -> float:
    """By how much the last token of `wanted` beats another one, by the model alone."""
    logits = naive.shaped(
        naive.last_logits(model, [*prompt, *wanted[:-1]]), sampling, prompt, wanted[:-1]
    )
    if sampling.greedy:
        return float(logits[wanted[-1]] - logits[other])
    scaled = logits / sampling.temperature
    scores = scaled + naive.noise(sampling.seed, len(wanted) - 1, len(logits))
    kept = naive.kept(scaled, sampling, 2 * CERTAIN)
    return float(scores[wanted[-1]] - scores[other]) if kept[other] else float(np.inf)
