"""Tiny checkpoints that bring an MTP head, named as their publishers name its weights."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils

from tests.families import END, build, save_tokenizer, write_json
from tests.family_configs import BASE, DEEPSEEK_V3, EVERY, FAMILIES, VOCABULARY, Config
from trouper_lab.engine_programs.tiny_families import draw

Kind = Literal["random", "of embeddings", "of states"]
"""What a head says: anything; or what the model says, from the embedding of a token or from the
hidden state before it."""
Weights = dict[str, mx.array]
HEADS = ("qwen3_5", "qwen3_next", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "mimo")
SOME_HEADS = HEADS if EVERY else ("qwen3_5", "deepseek_v3", "mimo")
"""One of each publisher's names."""
LIKE_DEEPSEEK = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Families whose heads are layers behind the last one."""
CONFIGS: dict[str, Config] = {
    **FAMILIES,
    "glm4_moe": {
        **BASE,
        "model_type": "glm4_moe",
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe_lite": {**BASE, **DEEPSEEK_V3, "model_type": "glm4_moe_lite", "n_group": 1},
    "mimo": {**BASE, "model_type": "mimo", "num_nextn_predict_layers": 1},
}
"""By family; of some the tests have heads alone."""
ZEROS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
"""Layers whose outputs are added to the hidden state."""
NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "norm.weight",
    "q_norm.weight",
    "k_norm.weight",
)
OWN = {
    "embedding_norm": ("pre_fc_norm_embedding", "enorm", "token_layernorm"),
    "hidden_norm": ("pre_fc_norm_hidden", "hnorm", "hidden_layernorm"),
    "projection": ("fc", "eh_proj", "input_proj"),
    "norm": ("norm", "shared_head.norm", "final_layernorm"),
}
"""A head's own parts as Qwen, DeepSeek and MiMo name them."""


def planted(name: str, config: Config | None = None) -> nn.Module:
    """A model that counts: the token after t is t + 1, modulo the size of its hidden states. Its
    layers add nothing."""
    model, size = build(name, config=config or CONFIGS[name]), size_of(name, config)
    changed: list[tuple[str, mx.array]] = []
    units = np.eye(size, dtype=np.float32)
    for path, array in tree_flatten(model.parameters()):
        if path.endswith(ZEROS):
            changed.append((path, mx.zeros(array.shape)))
        elif path.endswith("embed_tokens.weight"):
            changed.append((path, mx.array(units[np.arange(VOCABULARY) % size])))
        elif path.endswith("lm_head.weight"):
            head = np.zeros((VOCABULARY, size), np.float32)
            head[:size] = np.roll(units, 1, axis=0) * 2
            changed.append((path, mx.array(head)))
        elif path.endswith("model.norm.weight"):
            changed.append((path, mx.ones(array.shape)))
    model.update(tree_unflatten(changed))
    mx.eval(model.parameters())
    return model


def head_weights(name: str, kind: Kind, seed: int = 3, config: Config | None = None) -> Weights:
    """The head's weights as mlx-lm would hold them: its own parts, and those of its layer as
    `layer.*`."""
    random, size = np.random.RandomState(seed), size_of(name, config)
    single = single_layer(name, config)
    inner: Any = getattr(single, "language_model", single).model
    shapes = {
        f"layer.{path}": array.shape for path, array in tree_flatten(inner.layers[0].parameters())
    }
    shapes |= {"projection.weight": (size, 2 * size)}
    shapes |= {f"{own}.weight": (size,) for own in ("embedding_norm", "hidden_norm", "norm")}
    weights = {path: mx.array(draw(name, path, shape, random)) for path, shape in shapes.items()}
    if kind != "random":
        weights = {path: _planted(path, weight, kind) for path, weight in weights.items()}
    return weights


def _planted(path: str, weight: mx.array, kind: Kind) -> mx.array:
    if path.endswith(ZEROS):
        return mx.zeros(weight.shape)
    if path == "projection.weight":
        part = np.eye(weight.shape[0], dtype=np.float32)
        none = np.zeros_like(part)
        counting = np.roll(part, 1, axis=0)  # From a token's unit vector to the next one's.
        return mx.array(
            np.concatenate([part, none] if kind == "of embeddings" else [none, counting], axis=1)
        )
    return mx.ones(weight.shape) if path in {f"{own}.weight" for own in OWN} else weight


def size_of(name: str, config: Config | None = None) -> int:
    """Size of hidden states."""
    config = config or CONFIGS[name]
    return int(config.get("text_config", config)["hidden_size"])


def single_layer(name: str, config: Config | None = None) -> nn.Module:
    """A model of the family with one layer, which has full attention and experts if the family
    has."""
    config = deepcopy(config or CONFIGS[name])
    level = config.get("text_config", config)
    level |= {"num_hidden_layers": 1, "full_attention_interval": 1, "first_k_dense_replace": 0}
    kind, arguments = utils._get_classes(config)
    model: nn.Module = kind(arguments.from_dict(config))
    return model


# -- names of publishers -------------------------------------------------------------------------


def published(
    name: str, weights: Weights, *, original: bool = True, config: Config | None = None
) -> Weights:
    """Weights of a head as checkpoints name them. `original`: as the publisher's own, or as a
    converted one."""
    config = config or CONFIGS[name]
    qwen = name.startswith("qwen")
    layers = config.get("text_config", config)["num_hidden_layers"]
    prefix = f"model.layers.{layers}." if name in LIKE_DEEPSEEK else "model.mtp_layers.0."
    if qwen:
        prefix = "mtp." if original else "language_model.mtp."
    publisher = 0 if qwen else 1 if name in LIKE_DEEPSEEK else 2
    named: Weights = {}
    for path, weight in weights.items():
        part, _, leaf = path.rpartition(".")
        if part in OWN:
            named[f"{prefix}{OWN[part][publisher]}.{leaf}"] = weight
        else:
            named[f"{prefix}{'layers.0.' if qwen else ''}{path.removeprefix('layer.')}"] = weight
    if name == "mimo":
        own, size = named[f"{prefix}input_proj.weight"], size_of(name, config)
        named[f"{prefix}input_proj.weight"] = mx.concatenate([own[:, size:], own[:, :size]], axis=1)
    if name in LIKE_DEEPSEEK:
        named |= {
            f"{prefix}shared_head.head.weight": mx.zeros((VOCABULARY, size_of(name, config))),
            f"{prefix}embed_tokens.weight": mx.zeros((VOCABULARY, size_of(name, config))),
        }
    return _originals(name, named, config) if original else named


def _originals(name: str, named: Weights, config: Config) -> Weights:
    found: Weights = {}
    for path, weight in named.items():
        if ".switch_mlp." in path:
            found |= {
                path.replace("switch_mlp", f"experts.{index}"): part
                for index, part in enumerate(weight)
            }
        elif name.startswith("qwen") and "norm" in path and weight.ndim == 1:
            found[path] = weight - 1.0
        elif path.endswith("embed_q.weight"):
            values = named[path.replace("embed_q", "unembed_out")]
            both = mx.concatenate([weight.swapaxes(-1, -2), values], axis=1)
            found[path.replace("embed_q", "kv_b_proj")] = both.reshape(-1, config["kv_lora_rank"])
        elif not path.endswith("unembed_out.weight"):
            found[path] = weight
    return found


def _original_model(name: str, weights: Weights, config: Config) -> Weights:
    """A model's weights under the names of its publisher, before mlx-lm's changes."""
    renamed: Weights = {}
    for own, weight in weights.items():
        path = own.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        )
        renamed[path] = weight
        if name.startswith("qwen"):
            if "conv1d.weight" in path:
                renamed[path] = weight.moveaxis(1, 2)
            elif path.endswith(NORMS) and weight.ndim == 1 and "linear_attn" not in path:
                renamed[path] = weight - 1.0
    if name == "qwen3_5":
        return renamed
    experts = {path: weight for path, weight in renamed.items() if ".switch_mlp." in path}
    return {path: weight for path, weight in renamed.items() if path not in experts} | _originals(
        "", experts, config
    )


def save_with_head(
    name: str,
    directory: Path,
    kind: Kind = "random",
    *,
    original: bool = True,
    config: Config | None = None,
    seed: int = 3,
) -> Path:
    """A directory that `--model` takes. Models of heads that are not random count (`planted`)."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config or CONFIGS[name]
    model = build(name, config=config) if kind == "random" else planted(name, config)
    weights = dict(tree_flatten(model.parameters()))
    if original:
        weights = _original_model(name, weights, config)
    weights |= published(
        name, head_weights(name, kind, seed, config), original=original, config=config
    )
    mx.save_safetensors(
        str(directory / "model.safetensors"), weights, {"format": "pt" if original else "mlx"}
    )
    write_json(directory / "config.json", {**config, "eos_token_id": END})
    save_tokenizer(directory)
    return directory
