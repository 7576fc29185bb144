"""Tiny configs of mlx-vlm's text modules that mlx-lm does not have: the defaults of each module's
config classes with small numbers, and a line of data for those that need another one."""

from __future__ import annotations

import dataclasses
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tests.zoo.dense import DENSE
from tests.zoo.pieces import HIDDEN, INNER, VOCABULARY, WINDOW, Config
from trouper.engine.architectures import architecture_lookup, vision_texts, vlm_models

LAYERS, HEADS, KV_HEADS, HEAD, EXPERT, RANK = 4, 4, 2, 16, 32, 32
SMALL: Config = {
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "n_layer"), LAYERS),
    **dict.fromkeys(("intermediate_size", "mlp_hidden_size", "ffn_hidden_size"), INNER),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "ff_dim"), INNER),
    **dict.fromkeys(("num_attention_heads", "n_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "n_head"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "swa_num_key_value_heads"), KV_HEADS),
    **dict.fromkeys(("num_query_groups", "linear_num_key_heads", "o_groups"), KV_HEADS),
    **dict.fromkeys(("head_dim", "swa_head_dim", "v_head_dim", "swa_v_head_dim"), HEAD),
    **dict.fromkeys(("qk_nope_head_dim", "index_head_dim", "linear_key_head_dim"), HEAD),
    **dict.fromkeys(("linear_value_head_dim", "additional_vocab_size"), HEAD),
    **dict.fromkeys(("vocab_size", "embedding_size"), VOCABULARY),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_router_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), EXPERT),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), RANK),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "decoder_sparse_step"), 1),
    "expert_ffn_hidden_size": EXPERT,
    "index_n_heads": 16,
    "index_topk": 8,
    "linear_num_value_heads": HEADS,
    "moe_num_experts": 8,
    "qk_rope_head_dim": 8,
}
"""By field, whatever the default."""
NEEDED: Config = {
    "attention_bias": False,
    "auto_map": {},
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "mm_hidden_size": 32,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
}
"""Of fields without a default."""
ENCODER: Config = {
    "depth": 2,
    "hidden_size": 32,
    "image_size": 56,
    "model_type": "siglip_vision_model",
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 14,
}
"""Of fields of an encoder without a default. It is never computed."""
ENCODERS: dict[str, Config] = {
    "deepseek_vl_v2": {"model_type": "vision"},
    "deepseekocr": {"model_type": "vision"},
    "idefics2": {"model_type": "idefics2"},
    "llava_next": {"model_type": "clip_vision_model"},
    "multi_modality": {
        "model_type": "vision",
        "cls": "MlpProjector",
        "params": {"depth": 2, "input_dim": 32, "n_embed": HIDDEN, "projector_type": "mlp_gelu"},
    },
    "unlimited_ocr": {"model_type": "vision"},
}
"""Of encoders that are no SigLIP."""

ALTERNATING = ["sliding_attention", "full_attention"] * 2
MROPE: Config = {"type": "default", "mrope_section": [2, 1, 1]}
HALF_MROPE: Config = {**MROPE, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
DATA: dict[str, Config] = {
    "deepseek_v4": {"num_key_value_heads": 1},
    "ernie4_5_moe_vl": {
        "head_dim": HEAD,
        "mrope_section": [3, 3, 2],
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
    },
    "glm5_next": {
        "num_key_value_heads": HEADS,
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "qk_head_dim": HEAD,
        "linear_num_heads": HEADS,
        "linear_head_dim": HEAD,
        "index_kpool": 4,
    },
    "hunyuan_vl": {
        "rope_scaling": {"type": "xdrope", "alpha": 1000.0, "xdrope_section": [2, 2, 2, 2]},
        "attention_head_dim": HEAD,
    },
    "kolibri1": {"layer_types": ALTERNATING},
    "limite": {"rope_n_pairs": 4, "attn_gate_channels": 16, "ve_dim": 16, "global_layers": [3]},
    "llada2_moe": {"n_group": 2},
    "llava_next": {"model_type": "llama"},
    "mimo_v2": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "partial_rotary_factor": 0.5,
    },
    "minicpmv4_6": {"rope_parameters": HALF_MROPE},
    "minicpmv4_7": {"rope_parameters": HALF_MROPE},
    "moondream2": {"num_key_value_heads": HEADS},
    "moondream3": {"num_key_value_heads": HEADS, "rope_dim": 8},
    "multi_modality": {"model_type": "llama"},
    "nemotron_h_nano_omni": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": "M*M-",
    },
    "nemotron_nas": {"block_configs": DENSE["nemotron-nas"]["block_configs"]},
    "phi3_v": {"num_key_value_heads": KV_HEADS},
    "qwen3_5_moe_text": {"head_dim": HEAD},
    "qwen3_5_text": {"head_dim": HEAD},
    "step3p7": {
        "sliding_window": WINDOW,
        "num_attention_groups": KV_HEADS,
        "moe_top_k": 2,
        "share_expert_dim": EXPERT,
        "layer_types": ALTERNATING,
        "moe_layers_enum": [2, 3],
    },
    "unlimited_ocr": {"kv_lora_rank": RANK, "q_lora_rank": RANK},
}
NO_LANGUAGE = ("rfdetr", "rt_detr_v2", "sam3d_body")
"""Modules with a language.py and nothing in it: they find objects."""


def modules() -> list[str]:
    """Names of mlx-vlm's modules with a language model for whose `model_type` neither mlx-lm nor
    Trouper has one."""
    others = {*NO_LANGUAGE, *vision_texts.CLASSES, *architecture_lookup.ENCODERS}
    return sorted(
        name
        for name in vlm_models.names() - others
        if not architecture_lookup.is_native({"model_type": name})
    )


def config_of(name: str) -> Config:
    """Text fields stand in `text_config` and at the top, where some modules look for them."""
    sys.meta_path[:] = [one for one in sys.meta_path if one is not ABSENT] + [ABSENT]
    module = import_module(f"mlx_vlm.models.{name}")
    return _filled(name, module)


def _filled(name: str, module: ModuleType) -> Config:
    data, fields = DATA.get(name, {}), _names(module.ModelConfig)
    text = getattr(module, "TextConfig", None)
    inner = _values(text, SMALL, NEEDED | SMALL) | data if text else data
    config = inner | _values(module.ModelConfig, SMALL, NEEDED | SMALL) | data
    config = {key: value for key, value in config.items() if not key.endswith("_config")}
    if text and "text_config" in fields:
        config["text_config"] = {"model_type": name, **inner}
    for part in ("vision", "audio", "perceiver", "projector", "adapter"):
        kind = getattr(module, f"{part.title()}Config", None)
        if kind and f"{part}_config" in fields:
            own = ENCODERS.get(name, {})
            config[f"{part}_config"] = _values(kind, {}, ENCODER) | own
    for part in ("thinker", "talker"):
        if f"{part}_config" in fields:
            config[f"{part}_config"] = {"text_config": inner}
    return {**config, "model_type": name}


def _names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _values(kind: Any, small: Config, needed: Config) -> Config:
    """Defaults of a config class, with `small` numbers in their place, and `needed` ones where it
    has none. A default of None stays."""
    values = {}
    for field in dataclasses.fields(kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is dataclasses.MISSING:
            if field.name in needed:
                values[field.name] = needed[field.name]
        elif default is not None and not dataclasses.is_dataclass(default):
            values[field.name] = small.get(field.name, default)
    return values


class AbsentPackages(MetaPathFinder, Loader):
    """Stands in for packages that mlx-vlm requires and the project's environment leaves out: they
    read videos and sound."""

    NAMES = ("cv2", "mlx_audio")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        absent = fullname.split(".", maxsplit=1)[0] in self.NAMES
        return ModuleSpec(fullname, self, is_package=True) if absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentModule(name)


ABSENT = AbsentPackages()
