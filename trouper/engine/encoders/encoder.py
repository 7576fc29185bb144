"""Interface of an encoder, and what the architectures share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.platform.device import is_cpu
from trouper.engine.products import blocked_attention
from trouper.protocol.problems import ModelUnusable
from trouper.workarounds import mlx_scalar_functions

Weights = dict[str, mx.array]
ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
}
"""By transformers' names."""
CLASSIFIER = "ForSequenceClassification"
# A CPU keeps the scores of all queries of a call: 4 GB for a text of 8,192 tokens and 16 heads.
# Those of so many pairs of tokens stay in its caches.
CPU_SCORES = 2**21


class Encoder(nn.Module):
    """A model without cache. `score` is that of a cross-encoder."""

    vocabulary: int
    scores: bool = False
    """Whether the model is a cross-encoder, with a head of one number."""

    def __call__(self, tokens: mx.array, types: mx.array, mask: mx.array | None) -> mx.array:
        """Hidden states (rows, tokens, dim) of tokens (rows, tokens). `types`: 1 for tokens of a
        pair's second text. `mask`: (rows, tokens), False for padding; None: no padding."""
        raise NotImplementedError

    def score(self, hidden: mx.array) -> mx.array:
        """The logit (1,) of a pair with hidden states (tokens, dim)."""
        raise NotImplementedError

    def make_cache(self) -> list[Any]:
        """As mlx-lm's models: there is no cache."""
        return []


def activation(name: str) -> Callable[[mx.array], mx.array]:
    """Raises `ModelUnusable`."""
    if name not in ACTIVATIONS:
        raise ModelUnusable(f"the activation {name} is not known for encoders")
    if is_cpu() and mlx_scalar_functions.is_needed() and name in mlx_scalar_functions.FUNCTIONS:
        return mlx_scalar_functions.FUNCTIONS[name]
    return ACTIVATIONS[name]


def is_cross_encoder(config: Mapping[str, Any]) -> bool:
    """Raises `ModelUnusable` for a classifier of several classes."""
    classes = config.get("architectures")
    named = [str(each) for each in classes] if isinstance(classes, list) else []
    if not any(name.endswith(CLASSIFIER) for name in named):
        return False
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else int(config.get("num_labels") or 2)
    if count != 1:
        raise ModelUnusable(
            f"it is a classifier of {count} classes: of such models those with one score for a "
            "pair are served, as rerankers"
        )
    return True


def require(config: Mapping[str, Any], computed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises `ModelUnusable` for a key with a value that is not `computed`."""
    for key, values in computed.items():
        if key in config and config[key] not in values:
            raise ModelUnusable(
                f"{key} {config[key]} is not computed for this architecture",
                "docs/models.md has the embedders and rerankers that are",
            )


def padding_mask(mask: mx.array | None) -> mx.array | None:
    """For attention: (rows, 1, 1, tokens)."""
    return None if mask is None else mask[:, None, None, :]


def window_mask(width: int, reach: int, padding: mx.array | None) -> mx.array:
    """Tokens at most `reach` apart see each other: broadcastable to (rows, 1, width, width)."""
    at = mx.arange(width)
    distance = mx.abs(at[:, None] - at[None])[None, None]
    if padding is None:
        return distance <= reach
    # Padding sees itself: without any key its states would be no numbers, as would all later ones.
    return (distance <= reach) & (padding | (distance == 0))


def heads_of(x: mx.array, heads: int) -> mx.array:
    """(rows, tokens, heads * dim) to (rows, heads, tokens, dim)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | None,
    *,
    scale: float | None = None,
) -> mx.array:
    """Attention of (rows, heads, tokens, dim), joined to (rows, tokens, heads * dim). `mask`:
    broadcastable to (rows, heads, tokens, tokens). `scale`: of scores, `dim**-0.5` by default."""
    rows, _, tokens, dim = queries.shape
    if scale is None:
        scale = dim**-0.5
    if blocked_attention.supports(queries, keys, values, mask, {}):
        output = blocked_attention.attend(queries, keys, values, mask=mask, scale=scale)
    else:
        output = _attend_in_pieces(queries, keys, values, mask, scale)
    return output.transpose(0, 2, 1, 3).reshape(rows, tokens, -1)


def _attend_in_pieces(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None, scale: float
) -> mx.array:
    rows, heads, tokens, _ = queries.shape
    size = max(1, CPU_SCORES // (rows * heads * tokens)) if is_cpu() else tokens
    pieces = [
        mx.fast.scaled_dot_product_attention(
            queries[:, :, start : start + size],
            keys,
            values,
            scale=scale,
            mask=mask if mask is None or mask.shape[2] == 1 else mask[:, :, start : start + size],
        )
        for start in range(0, tokens, size)
    ]
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


class Dense(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)


def renamed(weights: Weights, other_names: Iterable[tuple[re.Pattern[str], str]]) -> Weights:
    """`other_names`: others' names, and what each becomes."""
    named = Weights()
    for stored_name, weight in weights.items():
        name = stored_name
        for pattern, replacement in other_names:
            name = pattern.sub(replacement, name)
        named[name] = weight
    return named


def split(weights: Weights, joined: str, names: Sequence[str]) -> Weights:
    """Split what has `joined` in the name into equal rows of `names`."""
    separate = Weights()
    for name, weight in weights.items():
        if joined not in name:
            separate[name] = weight
            continue
        for own, rows in zip(names, mx.split(weight, len(names)), strict=True):
            separate[name.replace(joined, own)] = rows
    return separate


def without(weights: Weights, prefixes: Iterable[str], unused: tuple[str, ...]) -> Weights:
    """Remove one of `prefixes` from names, and then what begins with one of `unused`."""
    stripped = {
        next((name[len(each) :] for each in prefixes if name.startswith(each)), name): weight
        for name, weight in weights.items()
    }
    return {name: weight for name, weight in stripped.items() if not name.startswith(unused)}
