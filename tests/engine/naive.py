"""Sampling as one would write it without a batch or a hurry: one row, float64, a full sort. What the engine must equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from trouper.engine.sampling.gumbel_noise import gumbel, mixed_seeds, stream_keys
from trouper.protocol.sampling import Sampling

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ranks = NDArray[np.intp]
MARGIN = 1e-3
"""A draw is certain when nothing within this of its logits changes it: rounding differs by 1e-4 at most."""


def shaped(logits: Floats, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> Floats:
    """Bias and penalties."""
    out = logits.copy()
    for token, bias in sampling.logit_bias:
        out[token] += bias
    for token in {*prompt, *answer}:
        repetition = sampling.repetition_penalty
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token, times in Counter(answer).items():
        out[token] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return out


def softmax(values: Floats) -> Floats:
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum())


def descending_order(scaled: Floats) -> Ranks:
    return np.argsort(-scaled, kind="stable")


def kept(scaled: Floats, sampling: Sampling, slack: float = 0.0, order: Ranks | None = None) -> Bools:
    """Which tokens top_k, then top_p, then min_p keep. `slack` > 0 keeps what almost was, < 0 drops what almost was not.
    order: the tokens by `descending_order`, for callers that need it more than once; sorting takes longest."""
    order = descending_order(scaled) if order is None else order
    descending = scaled[order]
    keep = np.ones(len(scaled), np.bool_)
    if 0 < sampling.top_k < len(scaled):
        least, best_outside = descending[sampling.top_k - 1], descending[sampling.top_k]
        keep = np.arange(len(scaled)) < sampling.top_k
        if slack > 0:
            keep = descending >= least - slack
        elif slack < 0:
            keep = descending > best_outside - slack
    weights = softmax(np.where(keep, descending, -np.inf)) if keep.any() else np.zeros(len(scaled))
    before = np.cumsum(weights) - weights
    if sampling.top_p < 1:
        keep &= before < sampling.top_p + slack
    if sampling.min_p > 0:
        keep &= descending >= descending[0] + np.log(sampling.min_p) - slack
    keep[0] = True
    mask = np.zeros(len(scaled), np.bool_)
    mask[order[keep]] = True
    return mask


def noise(seed: int, position: int, vocabulary: int) -> Floats:
    keys = stream_keys(mixed_seeds([seed]), np.array([position], np.uint64))
    return np.array(gumbel(keys, mx.arange(vocabulary, dtype=mx.uint32))[0], np.float64)


def choose(logits: Floats, sampling: Sampling, position: int) -> tuple[int, bool]:
    """The token that logits (after bias and penalties) give, and whether that is certain."""
    if sampling.greedy:
        first = int(np.argmax(logits))
        return first, bool(logits[first] - np.delete(logits, first).max() > MARGIN)
    scaled = logits / sampling.temperature
    scores = scaled + noise(sampling.seed, position, len(logits))
    order = descending_order(scaled)
    chosen = int(np.argmax(np.where(kept(scaled, sampling, order=order), scores, -np.inf)))
    loose = np.where(kept(scaled, sampling, 2 * MARGIN, order), scores, -np.inf)
    gap = scores[chosen] - np.delete(loose, chosen).max()
    return chosen, bool(gap > 2 * MARGIN and kept(scaled, sampling, -2 * MARGIN, order)[chosen])


def prefilled(model: nn.Module, tokens: Sequence[int]) -> list[Any]:
    """mlx-lm's own cache after all of these tokens but the last, in chunks of 32."""
    cache = make_prompt_cache(model)
    for begin in range(0, len(tokens) - 1, 32):
        model(mx.array([tokens[begin : min(begin + 32, len(tokens) - 1)]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    return list(cache)


def next_logits(model: nn.Module, token: int, cache: list[Any]) -> Floats:
    """(vocabulary,) logits behind one more token."""
    return np.array(model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32), np.float64)


def last_logits(model: nn.Module, tokens: Sequence[int]) -> Floats:
    """(vocabulary,) logits behind the last of these tokens, by the model alone."""
    return next_logits(model, tokens[-1], prefilled(model, tokens))


def generate(model: nn.Module, prompt: Sequence[int], sampling: Sampling, tokens: int) -> tuple[list[int], bool]:
    """An answer by the model alone with mlx-lm's own cache, and whether every token of it is certain."""
    cache = prefilled(model, prompt)
    answer: list[int] = []
    for position in range(tokens):
        fed = answer[-1] if answer else prompt[-1]
        logits = next_logits(model, fed, cache)
        token, certain = choose(shaped(logits, sampling, prompt, answer), sampling, position)
        answer.append(token)
        if not certain:
            return answer, False
    return answer, True


def certain_answer(
    model: nn.Module, prompt: Sequence[int], sampling: Sampling, tokens: int
) -> tuple[Sampling, list[int]]:
    """The first seed from `sampling.seed` on whose whole answer is certain, and that answer."""
    for seed in count(sampling.seed):
        seeded = attrs.evolve(sampling, seed=seed)
        answer, certain = generate(model, prompt, seeded, tokens)
        if certain:
            return seeded, answer
        assert not sampling.greedy, "the two best tokens of this prompt are too close: take another prompt"
        assert seed < sampling.seed + 20, "no certain answer in 20 seeds"
    raise AssertionError
