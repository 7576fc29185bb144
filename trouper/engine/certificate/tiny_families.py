"""Tiny random models of 27 families, of mlx-lm's own classes: every kind of cache and layer without
a hub.

float32, vocabulary 512, hidden size 64, about 1 MB each. Seeds are chosen so that the gap between
the best two logits is at least 3e-3 along the greedy path of the tests' prompts: a correct batch
differs from the row alone by at most 1e-4, so its greedy tokens must be equal.
"""

from __future__ import annotations

import importlib
from copy import deepcopy

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from trouper.engine.certificate.family_configs import FAMILIES, Config
from trouper.engine.certificate.family_weights import draw

SEEDS = {
    "llama": 2,
    "qwen2": 7,
    "qwen3": 1,
    "qwen3_moe": 6,
    "gemma3_text": 1,
    "gemma3n": 5,
    "gpt_oss": 6,
    "phi3": 7,
    "cohere2": 7,
    "llama4_text": 7,
    "mixtral": 1,
    "deepseek_v3": 6,
    "kimi_k25": 6,
    "qwen3_5": 5,
    "lfm2": 2,
    "granitemoehybrid": 3,
    "recurrent_gemma": 4,
    "olmo3": 2,
    "exaone4": 6,
    "bailing_moe_linear": 5,
}
"""Of seeds 0 to 7, the one with the largest smallest gap; 0 where it is not named."""


def build(name: str, seed: int | None = None, config: Config | None = None) -> nn.Module:
    """A model whose every parameter comes from a NumPy seed: the same in each process."""
    config = deepcopy(config or FAMILIES[name])
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    seed = SEEDS.get(name, 0) if seed is None else seed
    mx.random.seed(seed)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    random = np.random.RandomState(seed + 1)
    weights = [
        (path, mx.array(draw(name, path, array.shape, random)))
        for path, array in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model
