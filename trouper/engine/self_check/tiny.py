"""Makes a tiny random model of a large one's architecture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.architectures.architecture_lookup import get_classes
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.self_check.accuracy import Tokens, arithmetic_of, errors, run_alone, worst
from trouper.engine.self_check.shrinking import (
    PARTS_OF_LAYERS,
    VOCABULARY,
    Config,
    encoders,
    factors,
    layers_of,
    shrunk,
    values,
)

MAX_LAYERS = 24
MAX_VALUES = 30_000_000
"""Bound of a tiny model's parameters."""

# Factors of initial matrices, so that attention and experts matter beside the residual stream.
GAINS = (3.0, 8.0)
FULL_VOCABULARY = 10**9
AUDIBLE, FLOORS = 1e-2, 2
"""Minimum change of the logits with one token of the context: an error, and a multiple of the
bound's floor."""

# Ranges of decay parameters: with the initial ones a recurrent state forgets within two tokens.
SLOW: dict[str, tuple[float, float]] = {"A_log": (-1.5, 0.5), "dt_bias": (-3.5, -1.0)}
Signature = frozenset[tuple[str, ...]]


class CannotShrinkError(Exception):
    """No small config builds, has all kinds of layers, and gives logits that depend on the
    context."""


def configs(model: nn.Module, config: Mapping[str, Any]) -> Iterator[Config]:
    """Yield small configs with every kind of layer, smallest first. Evaluates nothing."""
    kinds, num_layers = signatures(model), layers_of(config)
    required = set(kinds)
    first = next((count for count in range(1, len(kinds) + 1) if set(kinds[:count]) == required), 1)
    last = min(num_layers, MAX_LAYERS)
    vocabulary = FULL_VOCABULARY if _knows_tokens(model) else VOCABULARY
    shares = any(PARTS_OF_LAYERS.search(key) and value for key, value in values(config))
    for by in factors(config, 0):
        for layers in range(min(2 if shares else max(first, 2), last), last + 1):
            by_layers = attrs.evolve(by, layers=layers, vocabulary=vocabulary)
            # Some models of mlx-vlm do not build without their encoders, which nothing computes.
            small = encoders(config) | shrunk(config, by_layers)
            if _builds(small, required):
                yield small
                break


def build(config: Config, seed: int, gain: float = GAINS[0]) -> nn.Module:
    """Build a float32 model with random weights. Seeds MLX's global generator."""
    mx.random.seed(seed)
    model = empty(config)
    model.set_dtype(mx.float32)
    model.update(tree_unflatten(_drawn(model, gain)))
    model.eval()
    mx.eval(model.parameters())
    return model


def vocabulary_of(model: nn.Module) -> int:
    """Evaluates nothing."""
    return int(model(mx.array([[1]]), cache=make_prompt_cache(model)).shape[-1])


def listens(model: nn.Module, text: Tokens) -> bool:
    """Whether the logits depend on earlier tokens."""
    other = [*text[:-3], text[-3] + 1, *text[-2:]]
    run = run_alone(model)
    original, changed = (run(tokens, [len(tokens)])[-1:] for tokens in (text, other))
    return worst(errors(changed, original)) > max(
        AUDIBLE, FLOORS * arithmetic_of(model, PLAIN).floor
    )


def empty(config: Mapping[str, Any]) -> nn.Module:
    """Make a model with lazy parameters."""
    model_class, args_class = get_classes(config)  # What `load_model` takes for the real one.
    model: nn.Module = model_class(args_class.from_dict(dict(config)))
    return model


def _drawn(model: nn.Module, gain: float) -> list[tuple[str, mx.array]]:
    """Scale initial matrices up, and add noise to constant parameters."""
    named = [
        (path, array)
        for path, array in tree_flatten(model.parameters())
        if mx.issubdtype(array.dtype, mx.floating)
    ]
    stats = [
        mx.stack([array.min(), array.max(), mx.abs(array.mean()), array.std()])
        for _, array in named
    ]
    return [
        (path, _redrawn(path, array, tuple(fact), gain))
        for (path, array), fact in zip(named, np.array(mx.stack(stats)).tolist(), strict=True)
    ]


def _redrawn(path: str, array: mx.array, stats: tuple[float, ...], gain: float) -> mx.array:
    low, high, mean, spread = stats
    if (decay := SLOW.get(path.rsplit(".", 1)[-1])) is not None:
        return mx.random.uniform(*decay, array.shape)
    if low == high:
        return array + 0.1 * mx.random.normal(array.shape)
    return array * gain if array.ndim > 1 and mean < spread else array


def _knows_tokens(model: nn.Module) -> bool:
    """Whether the model's code has an array of token ids (phi3small), which may point beyond a
    smaller vocabulary."""
    arrays = (
        value
        for _, part in model.named_modules()
        for value in part.values()
        if isinstance(value, mx.array)
    )
    lists = (
        value
        for value in arrays
        if value.ndim == 1 and value.size and mx.issubdtype(value.dtype, mx.integer)
    )
    return any(worst(value) >= VOCABULARY for value in lists)


def _builds(config: Config, kinds: set[Signature]) -> bool:
    try:
        model = empty(config)
        logits = model(mx.array([[1, 2]]), cache=make_prompt_cache(model))
        values = sum(array.size for _, array in tree_flatten(model.parameters()))
        return (
            logits.shape[:2] == (1, 2) and values <= MAX_VALUES and set(signatures(model)) == kinds
        )
    except Exception:  # noqa: BLE001
        # Any architecture's code over sizes that nobody chose: this one does not build.
        return False


def signatures(model: nn.Module) -> list[Signature]:
    """Describe the parts and the cache of each layer, as adapted."""
    adapted(model)
    layers, caches = list(model.layers), make_prompt_cache(model)
    kinds = (
        [type(cache).__name__ for cache in caches]
        if len(caches) == len(layers)
        else [""] * len(layers)
    )
    return [_signature(layer) | {(kind,)} for layer, kind in zip(layers, kinds, strict=True)]


def _signature(layer: nn.Module) -> Signature:
    parts = [(path, part) for path, part in layer.named_modules() if not _is_leaf(path, part)]
    names = {(_unnumbered(path), type(part).__name__) for path, part in parts}
    return frozenset(
        names | {(_unnumbered(path), *switch) for path, part in parts for switch in _switches(part)}
    )


def _is_leaf(path: str, part: nn.Module) -> bool:
    """Whether the part is a layer that may be quantized, adapted or sharded."""
    return "Linear" in type(part).__name__ or "Embedding" in type(part).__name__ or "lora" in path


def _unnumbered(path: str) -> str:
    return ".".join("#" if step.isdigit() else step for step in path.split("."))


def _switches(part: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in vars(part).items():
        if isinstance(value, bool) and not name.startswith("_") and name != "training":
            yield name, str(value)
