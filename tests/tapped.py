"""Tiny drafters that read taps, written as their publishers write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
import numpy as np

from tests.engine.tapped_references import Arrays, weights_of
from tests.families import write_json
from tests.family_configs import VOCABULARY, Config
from tests.heads import CONFIGS, size_of

Kind = Literal["eagle3", "dflash", "dspark"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 16, 96
DRAFTED = 200
"""Tokens of EAGLE-3's own vocabulary."""
BLOCK, MASK = 6, 500


def config_of(
    kind: Kind, name: str, target: Config | None = None, **changes: Any
) -> dict[str, Any]:
    """config.json of a drafter for a family's tiny model. `target`: another config of the model."""
    size = size_of(name, target)
    target = target or CONFIGS[name]
    target = target.get("text_config", target)
    layers = int(target["num_hidden_layers"])
    config: dict[str, Any] = {
        "hidden_size": size,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
    }
    if kind == "eagle3":
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": DRAFTED,
            "rope_theta": 10000.0,
            "eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers],
        }
    else:
        config |= {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "num_target_layers": layers,
            "rope_theta": 1000000.0,
            "block_size": BLOCK,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, layers - 1]},
        }
    if kind == "dspark":
        config |= {
            "architectures": ["Qwen3DSparkModel"],
            "layer_types": ["full_attention", "full_attention"],
            "markov_rank": 8,
            **config.pop("dflash_config"),
        }
    return config | changes


def counting_weights(config: dict[str, Any]) -> Arrays:
    """EAGLE-3 for a model that counts (`heads.planted`): its state is the next token's unit vector,
    which each pass turns into that of the one behind."""
    weights = weights_of("eagle3", config)
    size, scale = config["hidden_size"], 10.0
    units, none = np.eye(size, dtype=np.float32), np.zeros((size, size), np.float32)
    next_one = np.roll(units, 1, axis=0)
    loud = scale * size  # A normed unit vector has the square root of the size, twice.
    heads = np.roll(units, 1, axis=0) * 2
    return weights | {
        "fc.weight": np.concatenate([units, none, none], axis=1),
        "norm.weight": np.ones(size, np.float32),
        "lm_head.weight": heads,
        "d2t": np.zeros(size, np.int64),
        "midlayer.post_attention_layernorm.weight": np.ones(size, np.float32),
        "midlayer.self_attn.o_proj.weight": 0 * weights["midlayer.self_attn.o_proj.weight"],
        "midlayer.mlp.gate_proj.weight": scale * units,
        "midlayer.mlp.up_proj.weight": units,
        "midlayer.mlp.down_proj.weight": (next_one - units) / loud,
    }


def save_drafter(directory: Path, config: dict[str, Any], weights: Arrays) -> Path:
    """A directory that `--draft-model` takes: without a tokenizer, as drafters are published."""
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {name: mx.array(array) for name, array in weights.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), arrays, {"format": "pt"})
    write_json(directory / "config.json", config)
    return directory


def saved_drafter(
    directory: Path, kind: Kind, name: str, *, right: bool = False, **changes: Any
) -> Path:
    """Written once. `right`: an EAGLE-3 drafter of a model that counts."""
    size = size_of(name, changes.get("target"))
    path = directory / f"{kind}-{name}-{size}{'-right' * right}"
    if path.exists():
        return path
    if right:
        changes |= {"intermediate_size": size, "draft_vocab_size": size}
        config = config_of(kind, name, **changes)
        return save_drafter(path, config, counting_weights(config))
    config = config_of(kind, name, **changes)
    return save_drafter(path, config, weights_of(kind, config))
