"""One padded pass over prompts of several lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from trouper.engine.embeddings.embedding_modules import EncoderInput

Forward = Callable[[mx.array, mx.array, mx.array | None], mx.array]
"""From tokens, types and a mask (rows, tokens) to hidden states (rows, tokens, dim): see
`encoders.encoder.Encoder`."""


def run_padded(prompts: Sequence[EncoderInput], forward: Forward) -> list[mx.array]:
    """Return hidden states (tokens, dim) of each prompt, by one pass over prompts of like
    length."""
    hidden: dict[int, mx.array] = {}
    for group in like_lengths([len(prompt.tokens) for prompt in prompts]):
        states = forward(*_padded([prompts[index] for index in group]))
        for row, index in enumerate(group):
            hidden[index] = states[row, : len(prompts[index].tokens)]
    return [hidden[index] for index in range(len(prompts))]


def like_lengths(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices in groups, in which no length is below half of the longest: less than half of a pass
    is padding."""
    group = list[int]()
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if group and 2 * lengths[index] < lengths[group[0]]:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _padded(prompts: Sequence[EncoderInput]) -> tuple[mx.array, mx.array, mx.array | None]:
    lengths = [len(prompt.tokens) for prompt in prompts]
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    types = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, : lengths[row]] = prompt.tokens
        if prompt.second_at:
            types[row, prompt.second_at : lengths[row]] = 1
    mask = np.arange(tokens.shape[1]) < np.array(lengths)[:, None]
    return mx.array(tokens), mx.array(types), None if mask.all() else mx.array(mask)
