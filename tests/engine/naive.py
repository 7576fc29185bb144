"""Sampling as one would write it without a batch or a hurry: one row, float64, a full sort. What
the engine must equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import count
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from trouper.engine.sampling.sampler import gumbel, hashed, mixed_seeds, stream_keys
from trouper.protocol.sampling import Sampling

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ranks = NDArray[np.intp]
MARGIN = 1e-3
"""A draw is certain when nothing within this of its logits changes it: rounding differs by 1e-4 at
most."""


def never(_: Sequence[int]) -> bool:
    return False


def shaped(
    logits: Floats,
    sampling: Sampling,
    prompt: Sequence[int],
    answer: Sequence[int],
    breaks: Callable[[Sequence[int]], bool] = never,
) -> Floats:
    """Bias and penalties."""
    out = logits.copy()
    for token, bias in sampling.logit_bias:
        out[token] += bias
    for token in {*prompt, *answer}:
        repetition = sampling.repetition_penalty
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token, times in Counter(answer).items():
        out[token] -= sampling.presence_penalty + sampling.frequency_penalty * times
    for token, length in repetitions([*prompt, *answer], sampling, breaks).items():
        out[token] -= sampling.dry_multiplier * sampling.dry_base ** (
            length - sampling.dry_allowed_length
        )
    return out


def repetitions(
    tokens: Sequence[int], sampling: Sampling, breaks: Callable[[Sequence[int]], bool]
) -> dict[int, int]:
    """DRY by its definition: the longest repetition that each token would continue. `breaks`:
    whether a breaker ends with tokens."""
    if not sampling.dry:
        return {}
    last = sampling.dry_penalty_last_n
    window = list(tokens[-last:] if last > 0 else tokens)
    since = next((n for n in range(len(window)) if breaks(window[: len(window) - n])), len(window))
    longest: dict[int, int] = {}
    for end in range(1, len(window)):
        length = 0
        while length < min(end, since) and window[end - 1 - length] == window[-1 - length]:
            length += 1
        if length >= sampling.dry_allowed_length and not breaks(window[end : end + 1]):
            longest[window[end]] = max(longest.get(window[end], 0), length)
    return longest


def softmax(values: Floats) -> Floats:
    weights = np.exp(values - values.max())
    return np.asarray(weights / weights.sum())


def descending_order(scaled: Floats) -> Ranks:
    return np.argsort(-scaled, kind="stable")


def typical(descending: Floats, keep: Bools, typical_p: float, slack: float) -> Bools:
    """The tokens whose surprise is nearest to the entropy, until they weigh typical_p."""
    weights = softmax(np.where(keep, descending, -np.inf))
    logs = np.log(np.maximum(weights, 1e-300))
    distance = np.where(keep, np.abs(-logs + (weights * logs).sum()), np.inf)
    nearest = np.argsort(distance, kind="stable")
    heavy = np.cumsum(weights[nearest]) - weights[nearest] < typical_p + slack
    heavy[0] = True
    farthest = distance[nearest[heavy]].max() + slack
    return keep & (distance <= max(farthest, distance.min()))


def without_top(descending: Floats, keep: Bools, threshold: float, slack: float) -> Bools:
    """XTC: of the tokens that weigh `threshold` only the lightest is left."""
    weights = softmax(np.where(keep, descending, -np.inf))
    if slack and (np.abs(weights - threshold) < abs(slack) * threshold).any():
        return np.full(len(keep), slack > 0)
    above = np.flatnonzero(keep & (weights >= threshold))
    left = keep.copy()
    left[above[:-1]] = False
    return left


def coin(sampling: Sampling, position: int) -> bool:
    """Whether XTC applies to a row's token at a position."""
    keys = stream_keys(mixed_seeds([sampling.seed]), np.array([position], np.uint64))
    bits = np.array(hashed(keys, mx.array([2**32 - 1], mx.uint32)), np.float64)[0, 0]
    return bool((bits + 0.5) / 2**32 <= sampling.xtc_probability)


def kept(
    scaled: Floats,
    sampling: Sampling,
    slack: float = 0.0,
    order: Ranks | None = None,
    *,
    excludes: bool = False,
) -> Bools:
    """Which tokens top_k, then typical_p, top_p, min_p and, if it applies, XTC keep. `slack` > 0
    keeps what almost was, < 0 drops what almost was not. order: the tokens by `descending_order`,
    for callers that need it more than once; sorting takes longest."""
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
    if sampling.top_n_sigma > 0:
        keep &= descending >= descending[0] - sampling.top_n_sigma * scaled.std() - slack
    if sampling.typical_p < 1:
        keep = typical(descending, keep, sampling.typical_p, slack)
    weights = softmax(np.where(keep, descending, -np.inf)) if keep.any() else np.zeros(len(scaled))
    before = np.cumsum(weights) - weights
    first = int(np.argmax(keep))
    if sampling.top_p < 1:
        keep &= before < sampling.top_p + slack
    if sampling.min_p > 0:
        keep &= descending >= descending[first] + np.log(sampling.min_p) - slack
    keep[first] = True
    if excludes:
        keep = without_top(descending, keep, sampling.xtc_threshold, slack)
    mask = np.zeros(len(scaled), np.bool_)
    mask[order[keep]] = True
    return mask


@lru_cache(256)
def noise(seed: int, position: int, vocabulary: int) -> Floats:
    """(vocabulary,), read-only: all families and all filters draw with the same."""
    keys = stream_keys(mixed_seeds([seed]), np.array([position], np.uint64))
    values = np.array(gumbel(keys, mx.arange(vocabulary, dtype=mx.uint32))[0], np.float64)
    values.setflags(write=False)
    return values


def choose(logits: Floats, sampling: Sampling, position: int) -> tuple[int, bool]:
    """The token that logits (after bias and penalties) give, and whether that is certain."""
    if sampling.greedy:
        first = int(np.argmax(logits))
        return first, bool(logits[first] - np.delete(logits, first).max() > MARGIN)
    scaled = logits / sampling.temperature
    scores = scaled + noise(sampling.seed, position, len(logits))
    order = descending_order(scaled)
    keep = partial(kept, scaled, sampling, order=order, excludes=coin(sampling, position))
    chosen = int(np.argmax(np.where(keep(), scores, -np.inf)))
    loose = np.where(keep(2 * MARGIN), scores, -np.inf)
    gap = scores[chosen] - np.delete(loose, chosen).max()
    return chosen, bool(gap > 2 * MARGIN and keep(-2 * MARGIN)[chosen])


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


def generate(
    model: nn.Module, prompt: Sequence[int], sampling: Sampling, tokens: int
) -> tuple[list[int], bool]:
    """An answer by the model alone with mlx-lm's own cache, and whether every token of it is
    certain."""
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
        assert not sampling.greedy, (
            "the two best tokens of this prompt are too close: take another prompt"
        )
        assert seed < sampling.seed + 20, "no certain answer in 20 seeds"
    raise AssertionError
