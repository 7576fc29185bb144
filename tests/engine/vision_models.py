"""Tiny vision models of all families: configs, parameters of image processors, ids of tokens and
sizes of images. The weights are `vision_references.py`'s."""

from __future__ import annotations

from typing import Any

VOCABULARY = 256
IMAGE, START, END, BREAK = 250, 251, 252, 253
"""Ids of the image's token, of the marks around it, and of Pixtral's row break."""
PATCH = 4
FACTOR = 8
"""Side of a token in pixels: 2 x 2 patches are merged."""
TILE = 16

QWEN_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
QWEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": 254,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
GEMMA_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": True,
}
GEMMA4_TEXT: dict[str, Any] = GEMMA_TEXT | {
    "model_type": "gemma4_text",
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 30.0,
    "sliding_window": 48,
    "pad_token_id": 3,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
        },
    },
}
GEMMA4_VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "pooling_kernel_size": 2,
    "patch_size": PATCH,
    "position_embedding_size": 40,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4",
    "architectures": ["Gemma4ForConditionalGeneration"],
    "image_token_id": IMAGE,
    "boi_token_id": START,
    "eoi_token_id": END,
    "video_token_id": 254,
    "audio_token_id": 253,
    "audio_config": None,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
}
FLAT_VISION: dict[str, Any] = {
    "depth": 4,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN2: dict[str, Any] = QWEN_TEXT | {
    "num_hidden_layers": 3,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "image_token_id": IMAGE,
    "video_token_id": 254,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
MOONVIT: dict[str, Any] = {
    "patch_size": PATCH,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "merge_kernel_size": [2, 2],
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": TILE,
    "patch_size": PATCH,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}
INTERN_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
}
GLM_VISION: dict[str, Any] = FLAT_VISION | {
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 48,
    "image_size": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
GLM_TEXT: dict[str, Any] = QWEN_TEXT | {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 3, 3],
        "partial_rotary_factor": 0.5,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl": QWEN_IDS
    | {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": QWEN_TEXT
        | {
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
            },
        },
        "vision_config": QWEN_VISION
        | {"model_type": "qwen3_vl", "deepstack_visual_indexes": [0, 2]},
    },
    "qwen3_5": QWEN_IDS
    | {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": QWEN_TEXT
        | {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "full_attention_interval": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "attn_output_gate": True,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        "vision_config": QWEN_VISION | {"model_type": "qwen3_5", "deepstack_visual_indexes": []},
    },
    "mistral3": {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": IMAGE,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        "text_config": QWEN_TEXT
        | {
            "model_type": "mistral",
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rope_theta": 10000.0,
            "sliding_window": None,
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "hidden_act": "silu",
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "head_dim": 16,
            "num_channels": 3,
            "image_size": 64,
            "patch_size": PATCH,
            "rope_theta": 10000.0,
            "attention_dropout": 0.0,
        },
    },
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": START,
        "eoi_token_index": END,
        "image_token_index": IMAGE,
        "mm_tokens_per_image": 16,
        "vocab_size": VOCABULARY,
        "text_config": GEMMA_TEXT
        | {
            "model_type": "gemma3_text",
            "rope_theta": 10000.0,
            "rope_local_base_freq": 1000.0,
            "query_pre_attn_scalar": 16,
            "sliding_window_pattern": 2,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_channels": 3,
            "image_size": 32,
            "patch_size": PATCH,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "vision_use_head": False,
        },
    },
    "gemma4": GEMMA4
    | {
        "text_config": GEMMA4_TEXT
        | {"use_bidirectional_attention": "vision", "attention_k_eq_v": True},
        "vision_config": GEMMA4_VISION | {"standardize": True},
    },
    "gemma4_small": GEMMA4
    | {
        "text_config": GEMMA4_TEXT
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        "vision_config": GEMMA4_VISION | {"use_clipped_linears": True},
    },
    "gemma4_unified": GEMMA4
    | {
        "model_type": "gemma4_unified",
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "text_config": GEMMA4_TEXT
        | {"model_type": "gemma4_unified_text", "use_bidirectional_attention": "vision"},
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": PATCH,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 48,
            "mm_posemb_size": 32,
            "output_proj_dims": 48,
        },
    },
    "qwen2_vl": QWEN2
    | {
        "model_type": "qwen2_vl",
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "vision_config": FLAT_VISION
        | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "hidden_act": "quick_gelu"},
    },
    "qwen2_5_vl": QWEN2
    | {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": FLAT_VISION
        | {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "hidden_act": "silu",
            "window_size": 2 * FACTOR,
            "fullatt_block_indexes": [1, 3],
        },
    },
    "kimi_vl": {
        "model_type": "kimi_vl",
        "architectures": ["KimiVLForConditionalGeneration"],
        "media_placeholder_token_id": IMAGE,
        "vision_config": MOONVIT
        | {"model_type": "moonvit", "init_pos_emb_height": 4, "init_pos_emb_width": 4},
        "text_config": DEEPSEEK | {"q_lora_rank": None},
    },
    "kimi_k25": {
        "model_type": "kimi_k25",
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "media_placeholder_token_id": IMAGE,
        "vision_config": {
            "patch_size": PATCH,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "merge_kernel_size": [2, 2],
            "vt_hidden_size": 32,
            "vt_intermediate_size": 48,
            "vt_num_attention_heads": 2,
            "vt_num_hidden_layers": 3,
        },
        "text_config": DEEPSEEK | {"model_type": "kimi_k2"},
    },
    "idefics3": {
        "model_type": "idefics3",
        "architectures": ["Idefics3ForConditionalGeneration"],
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "vision_config": SIGLIP | {"model_type": "idefics3_vision"},
        "text_config": LLAMA,
        "tie_word_embeddings": False,
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": IMAGE,
        "scale_factor": 4,
        "vision_config": SIGLIP | {"model_type": "smolvlm_vision"},
        "text_config": LLAMA,
        "tie_word_embeddings": False,
    },
    "lfm2_vl": {
        "model_type": "lfm2_vl",
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "image_token_id": IMAGE,
        "downsample_factor": 2,
        "projector_hidden_size": 48,
        "projector_hidden_act": "gelu",
        "projector_bias": True,
        "projector_use_layernorm": True,
        "tie_word_embeddings": True,
        "vision_config": {
            **{key: value for key, value in SIGLIP.items() if key != "image_size"},
            "model_type": "siglip2_vision_model",
            "num_patches": 9,
            "vision_use_head": False,
        },
        "text_config": {
            "model_type": "lfm2",
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "block_dim": 64,
            "intermediate_size": 96,
            "block_ff_dim": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 2,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        },
    },
    "llama4": {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
        "vision_config": {
            "model_type": "llama4_vision_model",
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_channels": 3,
            "image_size": TILE,
            "patch_size": PATCH,
            "pixel_shuffle_ratio": 0.5,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
            "vision_output_dim": 48,
            "rope_theta": 10000.0,
        },
        "text_config": LLAMA
        | {
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 32,
            "attention_bias": False,
            "use_qk_norm": True,
            "rope_scaling": None,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
    },
    "internvl": {
        "model_type": "internvl",
        "architectures": ["InternVLForConditionalGeneration"],
        "image_token_id": IMAGE,
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "vision_config": INTERN_VISION
        | {
            "model_type": "internvl_vision",
            "attention_bias": True,
            "image_size": [TILE, TILE],
            "patch_size": [PATCH, PATCH],
        },
        "text_config": QWEN_TEXT
        | {"model_type": "qwen2", "num_hidden_layers": 3, "rope_theta": 10000.0},
    },
    "internvl_chat": {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
        "downsample_ratio": 0.5,
        "max_dynamic_patch": 4,
        "ps_version": "v2",
        "select_layer": -1,
        "tie_word_embeddings": False,
        "vision_config": INTERN_VISION
        | {
            "model_type": "intern_vit_6b",
            "norm_type": "rms_norm",
            "qk_normalization": True,
            "qkv_bias": False,
            "image_size": TILE,
            "patch_size": PATCH,
        },
        "llm_config": QWEN_TEXT
        | {
            "model_type": "qwen3",
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rope_theta": 10000.0,
        },
    },
    "glm4v": QWEN_IDS
    | {
        "model_type": "glm4v",
        "architectures": ["Glm4vForConditionalGeneration"],
        "vision_config": GLM_VISION | {"model_type": "glm4v_vision"},
        "text_config": GLM_TEXT | {"model_type": "glm4v_text"},
    },
    "glm4v_moe": QWEN_IDS
    | {
        "model_type": "glm4v_moe",
        "architectures": ["Glm4vMoeForConditionalGeneration"],
        "vision_config": GLM_VISION | {"model_type": "glm4v_moe_vision"},
        "text_config": GLM_TEXT
        | {
            "model_type": "glm4v_moe_text",
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
        },
    },
}
FIRST = tuple(CONFIGS)[:7]
"""Their references are of `vision_references.json`, and have no answers."""
QWEN_PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": FACTOR**2, "longest_edge": 64 * FACTOR**2},
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
GEMMA4_PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": PATCH,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
    "do_normalize": False,
}
HALVES: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN2_PROCESSOR = HALVES | {"min_pixels": FACTOR**2, "max_pixels": 64 * FACTOR**2}
GLM_SIZE = {"size": {"shortest_edge": 2 * FACTOR**2, "longest_edge": 128 * FACTOR**2}}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_vl": QWEN_PREPROCESSOR,
    "qwen3_5": QWEN_PREPROCESSOR,
    "mistral3": {
        "image_processor_type": "PixtralImageProcessorFast",
        "size": {"longest_edge": 64},
        "patch_size": PATCH,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 32, "width": 32},
        "resample": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "gemma4": GEMMA4_PREPROCESSOR,
    "gemma4_small": GEMMA4_PREPROCESSOR,
    "gemma4_unified": GEMMA4_PREPROCESSOR | {"image_processor_type": "Gemma4UnifiedImageProcessor"},
    "qwen2_vl": QWEN2_PROCESSOR,
    "qwen2_5_vl": QWEN2_PROCESSOR,
    "kimi_vl": HALVES | {"in_token_limit": 256, "pad_input": True},
    "kimi_k25": {"media_proc_cfg": HALVES | {"in_patch_limit": 256}},
    "idefics3": HALVES
    | {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}},
    "smolvlm": HALVES
    | {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}},
    "lfm2_vl": HALVES
    | {
        "tile_size": TILE,
        "min_image_tokens": 1,
        "max_image_tokens": 4,
        "max_tiles": 4,
        "max_pixels_tolerance": 1.5,
    },
    "llama4": HALVES | {"size": {"height": TILE, "width": TILE}, "max_patches": 4},
    "glm4v": HALVES | GLM_SIZE,
    "glm4v_moe": HALVES | GLM_SIZE,
    "internvl": HALVES | {"size": {"height": TILE, "width": TILE}, "max_patches": 4},
    "internvl_chat": HALVES | {"size": TILE},
}
FILLED_SIZES = ((24, 40), (16, 16), (32, 24), (24, 40))
"""15, 4, 12 and 15 tokens."""
GEMMA4_SIZES = ((56, 80), (64, 64), (40, 112), (56, 80))
WIDE_SIZES = ((16, 32), (16, 16), (32, 16), (16, 32))
SIZES: dict[str, tuple[tuple[int, int], ...]] = {
    "gemma3": ((32, 32),) * 4,
    **dict.fromkeys(("gemma4", "gemma4_small", "gemma4_unified"), GEMMA4_SIZES),
    **dict.fromkeys(("idefics3", "smolvlm"), ((16, 32), (32, 32), (32, 16), (16, 32))),
    **dict.fromkeys(("lfm2_vl", "llama4", "internvl", "internvl_chat"), WIDE_SIZES),
}
"""(height, width) of each image, which no family resizes; `FILLED_SIZES` of others. Gemma 4 fills
its bound: 70, 64, 70 and 70 tokens."""
TILED = ("idefics3", "smolvlm", "lfm2_vl", "llama4", "internvl", "internvl_chat")
PAIRS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (1, 4), (3, 1), (4, 1))
IDEFICS_IDS: dict[str, int] = {
    "<image>": IMAGE,
    "<fake_token_around_image>": START,
    "<global-img>": END,
    "Ċ": 10,
    "ĊĊ": 220,
    **{f"<row_{row}_col_{column}>": 200 + 4 * row + column for row, column in PAIRS},
}
INTERN_IDS = {"<IMG_CONTEXT>": IMAGE, "<img>": START, "</img>": END}
PIXTRAL_IDS = {"[IMG]": IMAGE, "[IMG_BREAK]": BREAK, "[IMG_END]": END}
TOKEN_IDS: dict[str, dict[str, int]] = {
    **{key: {"<|image_pad|>": IMAGE} for key in CONFIGS},
    "mistral3": PIXTRAL_IDS,
    "glm4v": {"<|image|>": IMAGE},
    "glm4v_moe": {"<|image|>": IMAGE},
    "internvl": INTERN_IDS,
    "internvl_chat": INTERN_IDS,
    "kimi_vl": {"<|media_pad|>": IMAGE},
    "kimi_k25": {"<|media_pad|>": IMAGE},
    "idefics3": IDEFICS_IDS,
    "smolvlm": IDEFICS_IDS,
    "lfm2_vl": {
        "<image>": IMAGE,
        "<|image_start|>": START,
        "<|image_end|>": END,
        "<|img_thumbnail|>": 253,
        **{f"<|img_row_{row}_col_{column}|>": 200 + 4 * row + column for row, column in PAIRS},
    },
    "llama4": {
        "<|patch|>": IMAGE,
        "<|image_start|>": START,
        "<|image_end|>": END,
        "<|image|>": 253,
        "<|tile_x_separator|>": 200,
        "<|tile_y_separator|>": 201,
    },
}
