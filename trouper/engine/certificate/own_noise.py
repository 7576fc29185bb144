"""How far mlx-lm's own loop differs from itself on this device, when the same row runs in other
company or other chunks.

Where kernels change with the number of rows, no server can give in a batch what the row gives
alone: this says by how much.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from trouper.engine.platform.error_text import line_of
from trouper.engine.self_check.alone import random_texts

COMPANY = (2, 8)
"""Numbers of equal rows in one batch."""
PROMPT, DECODED = 40, 24

Floats = NDArray[np.float32]


def own_noise(model: nn.Module, vocabulary: int) -> dict[str, Any]:
    """Measure the largest change, over the decoded positions, of the lead of the best token over
    the second, in log-probability: by company, and when the whole text runs in one pass. Text:
    fixed random tokens, the same whatever is sampled."""
    [text] = random_texts([PROMPT + DECODED], vocabulary, 3)
    alone = _decoded(model, text, 1)
    second, best = np.argsort(alone, -1)[:, -2:].T
    leads: dict[str, Any] = {}
    for rows in COMPANY:
        try:
            leads[f"{rows} equal rows"] = _change(alone, _decoded(model, text, rows), best, second)
        except Exception as error:  # noqa: BLE001 - some architectures of mlx-lm batch by other caches only
            leads[f"{rows} equal rows"] = line_of(error)
    leads["one pass"] = _change(alone, _in_one_pass(model, text), best, second)
    return {"lead_changes": leads, "median_lead": float(np.median(_lead(alone, best, second)))}


def _decoded(model: nn.Module, text: list[int], rows: int) -> Floats:
    """(DECODED, vocabulary) log-probabilities of the first of equal rows that decode together."""
    cache, found = make_prompt_cache(model), []
    mx.eval(model(mx.array([text[:PROMPT]] * rows), cache=cache)[:, -1])
    for token in text[PROMPT:]:
        found.append(model(mx.array([[token]] * rows), cache=cache)[0, -1])
        mx.async_eval(found[-1])
    return _log_probabilities(mx.stack(found))


def _in_one_pass(model: nn.Module, text: list[int]) -> Floats:
    return _log_probabilities(model(mx.array([text]), cache=make_prompt_cache(model))[0, PROMPT:])


def _log_probabilities(logits: mx.array) -> Floats:
    logits = logits.astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, -1, keepdims=True))


def _lead(found: Floats, best: NDArray[np.int64], second: NDArray[np.int64]) -> Floats:
    index = np.arange(len(found))
    lead: Floats = found[index, best] - found[index, second]
    return lead


def _change(
    alone: Floats, other: Floats, best: NDArray[np.int64], second: NDArray[np.int64]
) -> float:
    return float(np.abs(_lead(other, best, second) - _lead(alone, best, second)).max())
