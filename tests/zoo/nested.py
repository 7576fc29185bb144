"""Configs of modules that wrap another module's text model, as those of models with images do."""

from __future__ import annotations

from tests.family_configs import ALTERNATING, FAMILIES
from tests.zoo.pieces import BASE, LATENT_EXPERTS, VOCABULARY, WINDOW, Config
from tests.zoo.windows import GEMMA4


def text(model_type: str, inner: Config) -> Config:
    return {"model_type": model_type, "text_config": inner, "vocab_size": VOCABULARY}


NESTED: dict[str, Config] = {
    "gemma3": text("gemma3", FAMILIES["gemma3_text"]),
    "gemma4": text("gemma4", GEMMA4),
    "kimi_k25": FAMILIES["kimi_k25"],
    "kimi_vl": text("kimi_vl", {**BASE, **LATENT_EXPERTS, "num_hidden_layers": 3}),
    "lfm2-vl": text("lfm2-vl", FAMILIES["lfm2"]),
    "llama4": text(
        "llama4",
        {
            **BASE,
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "intermediate_size": 32,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "rope_scaling": None,
            "use_qk_norm": True,
            "floor_scale": 8,
            "attn_scale": 0.5,
        },
    ),
    "mistral3": text("mistral3", {**BASE, "model_type": "llama"}),
    "mistral3 of ministral3": text(
        "mistral3",
        {
            **BASE,
            "model_type": "ministral3",
            "layer_types": ALTERNATING,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "pixtral": text("pixtral", {**BASE, "model_type": "llama"}),
    "qwen2_vl": text("qwen2_vl", {**BASE, "model_type": "qwen2"}),
    "qwen3_vl": text("qwen3_vl", {**BASE, "model_type": "qwen3"}),
    "qwen3_vl_moe": text("qwen3_vl_moe", FAMILIES["qwen3_moe"]),
}
