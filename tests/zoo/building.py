"""The zoo's models: every parameter drawn from a NumPy seed, by its name and by the value that
mlx-lm gives it at first."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from tests.family_configs import Config
from tests.zoo.catalogue import CONFIGS
from trouper_lab.engine_programs.tiny_families import BY_LEAF, Draw, Floats, Shape, normal, uniform

EMBEDDINGS = ("embed", "wte", "tok_embeddings", "token_embd")
NAMED: dict[str, Draw] = {
    **BY_LEAF,
    "quant_key_scale": uniform(0.02, 0.03),
    "quant_value_scale": uniform(0.02, 0.03),
    "ape": normal(0.3),
    "position_bias": normal(0.1),
    "gate_bias": normal(0.1),
}


def build(name: str, config: Config | None = None) -> nn.Module:
    """The model of a config by its name, float32; the same in each process."""
    config = deepcopy(config or CONFIGS[name])
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    return filled(module.Model(module.ModelArgs.from_dict(config)))


def filled(model: nn.Module) -> nn.Module:
    """A model with drawn parameters, evaluated."""
    random = np.random.RandomState(1)
    model.update(
        tree_unflatten(
            [(path, drawn(path, array, random)) for path, array in tree_flatten(model.parameters())]
        )
    )
    model.eval()
    mx.eval(model.parameters())
    return model


def drawn(path: str, first: mx.array, random: np.random.RandomState) -> mx.array:
    """One parameter; integers (tables) stay as they are."""
    if not mx.issubdtype(first.dtype, mx.floating):
        return first
    values = recipe(path, first)(random, tuple(first.shape))
    return mx.array(np.asarray(values, np.float32))


def recipe(path: str, first: mx.array) -> Draw:
    """By name where the name says it; a norm's weight varies around what it is at first; matrices
    by their width."""
    leaf, shape = path.rsplit(".", 1)[-1], first.shape
    if "w_lora" in path and leaf == "bias":
        return uniform(-6, -3)
    if leaf in NAMED:
        return NAMED[leaf]
    if any(part in path for part in EMBEDDINGS) and len(shape) == 2:
        return normal(0.5)
    if len(shape) < 2 or "norm" in path:
        return around(first)
    if "conv" in path and len(shape) == 3:
        return normal(shape[1] ** -0.5)
    return normal(1.5 * shape[-1] ** -0.5)


def around(first: mx.array) -> Draw:
    """Multipliers that begin as ones, and offsets that begin as zeros, each with some spread."""
    begin = np.array(first, np.float64)

    def draw(random: np.random.RandomState, shape: Shape) -> Floats:
        if not begin.any():
            return np.asarray(random.standard_normal(shape) * 0.1)
        return np.asarray(begin * random.uniform(0.8, 1.2, shape))

    return draw
