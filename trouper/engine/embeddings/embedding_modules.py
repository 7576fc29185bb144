"""Modules of sentence-transformers' `modules.json`: pooling and later layers.

Source: https://sbert.net/docs/package_reference/sentence_transformer/models.html. An unknown module
turns embeddings off: vectors would look right and be wrong. `Pool.vector` always normalizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from trouper.protocol.problems import ModelUnusable
from trouper.storage.checkpoint_files import require_regular

MODULES_FILE = "modules.json"
WEIGHTS_FILE = "model.safetensors"
PACKAGE = "sentence_transformers."

# By torch's class names, with torch's default parameters.
ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda vector: vector,
    "Tanh": mx.tanh,
    "ReLU": nn.relu,
    "GELU": nn.gelu,
    "SiLU": nn.silu,
    "Sigmoid": mx.sigmoid,
}
NORM_EPS = 1e-5  # torch's LayerNorm.
Step = Callable[[mx.array], mx.array]
"""From a vector (dim,) float32 to another."""


@attrs.frozen
class EncoderInput:
    tokens: list[int]
    second_at: int = 0
    """Index of a pair's second text, where the tokenizer tells both apart; else 0."""


Encode = Callable[[Sequence[EncoderInput]], list[mx.array]]
"""From whole prompts to hidden states (tokens, dim) of each."""


class NotSupported(Exception):
    """The message names the module."""


@attrs.frozen
class EmbeddingModules:
    """`pooling`: directory of the pooling's config."""

    pooling: str = "1_Pooling"
    steps: tuple[Step, ...] = ()
    encode: Encode | None = None
    """For one-pass models."""
    normalizes: bool = True
    """False for scores."""

    def cut(self, dimensions: int) -> EmbeddingModules:
        """With the first `dimensions` numbers of each vector."""
        return attrs.evolve(self, steps=(*self.steps, lambda vector: vector[:dimensions]))

    def applied(self, vector: mx.array) -> mx.array:
        for step in self.steps:
            vector = step(vector)
        return vector


NO_MODULES = EmbeddingModules()


def modules_of(directory: Path) -> EmbeddingModules:
    """Read the pooling and the steps behind it, in the order that sentence-transformers fixes.
    Raises `NotSupported` for another module or order."""
    named = _read(directory / MODULES_FILE)
    if named is None:
        return NO_MODULES
    if not isinstance(named, list) or not all(isinstance(module, dict) for module in named):
        raise NotSupported(f"{MODULES_FILE} is no list of modules")
    pooling, steps = NO_MODULES.pooling, list[Step]()
    for index, module in enumerate(named):
        path, kind = str(module.get("path", "")), str(module.get("type", ""))
        name = f"{path or index} ({kind}) of {MODULES_FILE}"
        match kind.rpartition(".")[2] if kind.startswith(PACKAGE) else "":
            case "Transformer" if not index and not path:
                continue
            case "Pooling" if index == 1:
                pooling = path
            case "Dense" if index > 1:
                steps.append(_dense(directory / path, name))
            case "LayerNorm" if index > 1:
                steps.append(_layer_norm(directory / path, name))
            case "Normalize" if index > 1:
                _require_vector(_config_of(directory / path), name)
                steps.append(normalized)
            case "Dropout":
                continue
            case _:
                raise NotSupported(f"{name} is not supported here")
    return EmbeddingModules(pooling, tuple(steps))


def normalized(vector: mx.array) -> mx.array:
    return vector / mx.maximum(mx.linalg.norm(vector), 1e-12)


def _config_of(directory: Path) -> dict[str, Any]:
    config = _read(directory / "config.json")
    return config if isinstance(config, dict) else {}


def _require_vector(config: Mapping[str, Any], name: str) -> None:
    if {config.get(key) for key in ("module_input_name", "module_output_name")} - {
        None,
        "sentence_embedding",
    }:
        raise NotSupported(
            f"{name} is not applied to the pooled vector, which is not supported here"
        )


def _dense(directory: Path, name: str) -> Step:
    config = _config_of(directory)
    _require_vector(config, name)
    function = str(config.get("activation_function") or "torch.nn.modules.activation.Tanh")
    activation = (
        ACTIVATIONS.get(function.rpartition(".")[2]) if function.startswith("torch.nn.") else None
    )
    if activation is None:
        raise NotSupported(f"{name} has the activation {function}, which is not supported here")
    weights = _weights(directory, name, "linear.weight")
    weight, bias = weights["linear.weight"], weights.get("linear.bias")
    projection, adds_input = weights.get("residual.weight"), config.get("use_residual") is True

    def step(vector: mx.array) -> mx.array:
        product = weight @ vector
        output = activation(product if bias is None else product + bias)
        if not adds_input:
            return output
        return output + (vector if projection is None else projection @ vector)

    return step


def _layer_norm(directory: Path, name: str) -> Step:
    weights = _weights(directory, name, "norm.weight")
    weight, bias = weights["norm.weight"], weights.get("norm.bias")
    return lambda vector: mx.fast.layer_norm(vector, weight, bias, NORM_EPS)


def _weights(directory: Path, name: str, needed: str) -> dict[str, mx.array]:
    """In float32, evaluated."""
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        raise NotSupported(
            f"{name} has no {WEIGHTS_FILE}: save the model in that format, others are not read"
        )
    try:
        stored: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        weights = {key: array.astype(mx.float32) for key, array in stored.items()}
        mx.eval(weights)
    except (OSError, RuntimeError, ValueError) as error:
        raise NotSupported(f"{name}: {WEIGHTS_FILE} cannot be read: {error}") from error
    if needed not in weights:
        raise NotSupported(f"{name}: {WEIGHTS_FILE} has no {needed}")
    return weights


def _read(path: Path) -> Any:
    """None: missing or no JSON."""
    try:
        require_regular(path)
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ModelUnusable, OSError, ValueError, RecursionError) as error:
        raise NotSupported(f"{path.name} cannot be read: {error}") from error
