"""Variants: scaled rotary embeddings, tied embeddings, as many KV heads as heads, no window."""

from __future__ import annotations

from tests.family_configs import FAMILIES
from tests.zoo.pieces import BASE, LATENT_EXPERTS, SHORT_CONTEXT, Config

DYNAMIC: Config = {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}
LINEAR: Config = {"type": "linear", "rope_type": "linear", "factor": 2.0}
LLAMA3: Config = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": SHORT_CONTEXT,
}
YARN: Config = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": SHORT_CONTEXT,
}
LONG: Config = {
    "type": "longrope",
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "original_max_position_embeddings": SHORT_CONTEXT,
}


def scaled(model_type: str, scaling: Config) -> Config:
    return {
        **BASE,
        "model_type": model_type,
        "rope_scaling": scaling,
        "max_position_embeddings": SHORT_CONTEXT,
    }


ROPES: dict[str, Config] = {
    "llama with dynamic rope": scaled("llama", DYNAMIC),
    "llama with linear rope": scaled("llama", LINEAR),
    "llama with llama3 rope": scaled("llama", LLAMA3),
    "llama with yarn rope": scaled("llama", YARN),
    "llama with longrope": {**scaled("llama", LONG), "max_position_embeddings": 8 * SHORT_CONTEXT},
    "llama with traditional dynamic rope": {**scaled("llama", DYNAMIC), "rope_traditional": True},
    "internlm2 with dynamic rope": scaled("internlm2", DYNAMIC),
    "internlm2 with linear rope": scaled("internlm2", LINEAR),
    "internlm3 with dynamic rope": scaled("internlm3", DYNAMIC),
    "qwen2 with dynamic rope": scaled("qwen2", DYNAMIC),
    "qwen2 with yarn rope": scaled("qwen2", YARN),
    "qwen3 with yarn rope": scaled("qwen3", YARN),
    "qwen3_moe with yarn rope": {**FAMILIES["qwen3_moe"], "rope_scaling": YARN},
    "seed_oss with dynamic rope": scaled("seed_oss", DYNAMIC),
    "gpt_oss with yarn rope": {**FAMILIES["gpt_oss"], "rope_scaling": YARN},
    "gemma3_text with linear rope": {**FAMILIES["gemma3_text"], "rope_scaling": LINEAR},
    "phi3 with longrope": {
        **BASE,
        "model_type": "phi3",
        "rope_scaling": LONG,
        "original_max_position_embeddings": SHORT_CONTEXT,
        "max_position_embeddings": 8 * SHORT_CONTEXT,
    },
    "phi3 with su rope": {
        **BASE,
        "model_type": "phi3",
        "rope_scaling": {**LONG, "type": "su"},
        "original_max_position_embeddings": SHORT_CONTEXT,
        "max_position_embeddings": 8 * SHORT_CONTEXT,
    },
    "phi3 with linear rope": scaled("phi3", {**LINEAR, "long_factor": [1.0]}),
    "minicpm3": {
        **BASE,
        "model_type": "minicpm3",
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "num_key_value_heads": 4,
        "dim_model_base": 64,
        "scale_depth": 1.4,
        "scale_emb": 2.0,
        "rope_scaling": LONG,
        "max_position_embeddings": 8 * SHORT_CONTEXT,
    },
    "deepseek_v3 with yarn rope": {
        **FAMILIES["deepseek_v3"],
        "rope_scaling": {
            **YARN,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "deepseek_v2": {
        **BASE,
        **LATENT_EXPERTS,
        "model_type": "deepseek_v2",
        "num_hidden_layers": 3,
        "rope_scaling": {
            **YARN,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "telechat3 with yarn rope": scaled("telechat3", {**YARN, "type": "telechat3-yarn"}),
    "llama with tied embeddings": {**BASE, "model_type": "llama", "tie_word_embeddings": True},
    "llama with as many KV heads as heads": {
        **BASE,
        "model_type": "llama",
        "num_key_value_heads": 4,
    },
    "llama with one KV head": {**BASE, "model_type": "llama", "num_key_value_heads": 1},
    "qwen3 with tied embeddings": {**BASE, "model_type": "qwen3", "tie_word_embeddings": True},
    "gpt_oss with as many KV heads as heads": {**FAMILIES["gpt_oss"], "num_key_value_heads": 4},
    "exaone4 without a window": {
        **FAMILIES["exaone4"],
        "sliding_window": None,
        "sliding_window_pattern": None,
    },
    "deepseek_v3 without a query rank": {**FAMILIES["deepseek_v3"], "q_lora_rank": None},
}
