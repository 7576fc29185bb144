"""Tiny random models of 27 families from mlx-lm's classes.

float32, vocabulary 512, hidden size 64, about 1 MB. Seeds leave 3e-3 between the best logits along
the tests' greedy paths; batches differ by 1e-4.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from copy import deepcopy

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from trouper_lab.engine_programs.family_configs import FAMILIES, Config

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
"""Of 0 to 7 with the largest gap; 0 for others."""


def build(name: str, seed: int | None = None, config: Config | None = None) -> nn.Module:
    """Parameters come from a NumPy seed."""
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


Floats = npt.NDArray[np.float64]
Shape = tuple[int, ...]
Draw = Callable[[np.random.RandomState, Shape], Floats]

SCALES = {
    "gemma2": (0.05, 0.0, 1.5),
    "gemma3n": (0.05, 0.0, 1.5),
    "cohere2": (0.4, 0.0, 2.5),
    "lfm2": (0.4, 0.0, 2.0),
    "gemma3_text": (0.25, 0.25, 1.5),
    "recurrent_gemma": (0.25, 0.25, 1.5),
}
"""Deviation of embeddings and head, gain of layers."""
USUAL_SCALES = (1.0, 0.5, 1.5)
FINAL_NORM_GAIN = {"gemma2": 6.0, "gemma3n": 7.0}
"""Spreads small tied logits."""
NORM_AROUND_ZERO = ("gemma2", "gemma3_text", "recurrent_gemma")


def normal(deviation: float) -> Draw:
    return lambda random, shape: random.standard_normal(shape) * deviation


def uniform(low: float, high: float) -> Draw:
    return lambda random, shape: random.uniform(low, high, shape)


BY_LEAF: dict[str, Draw] = {
    "A_log": lambda random, shape: np.log(random.uniform(0.2, 2.0, shape)),
    "dt_bias": uniform(-3.5, -1.0),
    "recurrent_param": uniform(-6, -3),
    "D": uniform(0.5, 1.5),
    "sinks": normal(1.0),
    "e_score_correction_bias": normal(0.05),
    "expert_bias": normal(0.05),
    "correct_output_scale": uniform(0.5, 1.5),
    **dict.fromkeys(("x_r", "x_w", "x_k", "x_v", "x_a", "x_g"), uniform(0.1, 0.9)),
    **dict.fromkeys(("k_k", "k_a", "r_k"), uniform(0.5, 1.0)),
}


def draw(
    family: str, path: str, shape: Shape, random: np.random.RandomState
) -> npt.NDArray[np.float32]:
    """Draw once a parameter: the order is the seed's meaning."""
    values = _recipe(family, path, shape)(random, shape)
    if path.endswith(("model.norm.weight", "language_model.norm.weight")):
        values = values + FINAL_NORM_GAIN.get(family, 1.0) - 1.0
    return values.astype(np.float32)


# A table, whose rows are conditions
def _recipe(family: str, path: str, shape: Shape) -> Draw:  # noqa: PLR0911
    embedding, head, gain = SCALES.get(family, USUAL_SCALES)
    leaf = path.rsplit(".", 1)[-1]
    if "embed_tokens" in path or "embeddings" in path:
        return normal(embedding)
    if "lm_head" in path or path == "output.weight":
        return normal(head)
    if leaf in BY_LEAF:
        return BY_LEAF[leaf]
    if "norm" in path and leaf == "weight":
        return uniform(-0.2, 0.2) if family in NORM_AROUND_ZERO else uniform(0.8, 1.2)
    if leaf.endswith("bias"):
        return uniform(-6, -3) if family == "rwkv7" and "w_lora" in path else normal(0.1)
    if "conv" in path and len(shape) == 3:
        return normal(shape[1] ** -0.5)
    assert len(shape) >= 2, (family, path, shape)
    return normal((1.0 if leaf.endswith("gate_weight") else gain) * shape[-1] ** -0.5)
