"""Tiny models of mlx-vlm's own classes, of model types that mlx-lm does not have, and their
checkpoints."""

from __future__ import annotations

import importlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from tests.families import END, save_tokenizer, write_json
from tests.family_configs import BASE, WINDOW, Config

VISION: Config = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 56,
}
MOLMO: Config = {
    "d_model": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 4,
    "mlp_hidden_size": 128,
    "vocab_size": 512,
    "embedding_size": 512,
}
MOLMO_VISION: Config = {
    "model_type": "molmo",
    "d_model": 64,
    "hidden_size": 64,
    "image_emb_dim": 32,
    "image_num_heads": 2,
    "image_num_key_value_heads": 2,
    "image_head_dim": 16,
    "image_mlp_dim": 64,
    "image_num_layers": 9,
}


def _sees(model_type: str, text_type: str, **text: object) -> Config:
    return {
        "model_type": model_type,
        "text_config": {**BASE, "model_type": text_type, **text},
        "vision_config": {
            **VISION,
            "model_type": model_type if model_type == "dots_ocr" else VISION["model_type"],
        },
    }


CONFIGS: dict[str, Config] = {
    "aya_vision": _sees(
        "aya_vision", "cohere2", sliding_window=WINDOW, sliding_window_pattern=2, logit_scale=1.0
    ),
    "idefics3": _sees("idefics3", "llama"),
    "internvl_chat": _sees("internvl_chat", "qwen2"),
    "molmo": {"model_type": "molmo", "text_config": MOLMO, "vision_config": MOLMO_VISION},
    "cohere2_moe": {
        **BASE,
        "model_type": "cohere2_moe",
        "intermediate_size": 32,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "logit_scale": 1.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_num_shared_experts": 1,
    },
    "k2_horizon": {**BASE, "model_type": "k2_horizon"},
    "paligemma": _sees("paligemma", "gemma"),
}
"""By mlx-vlm's module. Five read images; two are models of text that mlx-lm does not have."""
SERVED = ("aya_vision", "internvl_chat", "molmo", "cohere2_moe")
REFUSED = "paligemma"
"""The tokens of its prompts attend to the whole prompt: in chunks it says something else."""
SEEDS = {"internvl_chat": 3, "molmo": 4}
"""Of seeds 0 to 7, the one with the largest smallest gap between the two best logits on the path of
the tests; else 7."""


def whole(name: str, seed: int | None = None) -> Any:
    """A model of mlx-vlm's own class, with its encoder, built as mlx-vlm does; random weights, the
    same in each process."""
    from mlx_vlm.utils import update_module_configs

    module = importlib.import_module(f"mlx_vlm.models.{name}")
    config = deepcopy(CONFIGS[name])
    made = update_module_configs(
        module.ModelConfig.from_dict(config), module, config, ["text", "vision"]
    )
    model: nn.Module = module.Model(made)
    random = np.random.RandomState(SEEDS.get(name, 7) if seed is None else seed)
    drawn = [
        (path, mx.array(_draw(array.shape, random)))
        for path, array in tree_flatten(model.language_model.parameters())
    ]
    model.language_model.update(tree_unflatten(drawn))
    model.eval()
    mx.eval(model.parameters())
    return model


def _draw(shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray[Any, Any]:
    """Matrices that are strong enough for attention to matter, and gains around one."""
    values = random.standard_normal(shape).astype(np.float32)
    return values * (3 / np.sqrt(shape[-1])) if len(shape) > 1 else 1 + 0.1 * values


def save(model: nn.Module, name: str, directory: Path) -> Path:
    """A directory that `--model` takes, with the weights of the encoder, too."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    write_json(directory / "config.json", {**CONFIGS[name], "eos_token_id": END})
    save_tokenizer(directory)
    return directory


def own_loop(model: Any, prompt: list[int], n: int) -> list[int]:
    """`n` greedy tokens by mlx-vlm's language model alone, with mlx-vlm's own cache. Near ties
    would make tests chance: there are none."""
    from mlx_vlm.models.cache import make_prompt_cache

    language_model = model.language_model
    cache = make_prompt_cache(language_model)
    language_model(mx.array([prompt[:-1]]), cache=cache)
    tokens = [prompt[-1]]
    for _ in range(n):
        logits = np.array(language_model(mx.array([tokens[-1:]]), cache=cache).logits[0, -1])
        first, second = np.sort(logits)[[-1, -2]]
        assert first - second > 1e-3, "a near tie: choose another seed"
        tokens.append(int(logits.argmax()))
    return tokens[1:]
