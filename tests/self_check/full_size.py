"""Figures of published models' config.json, by the name that the model has on the hub. Nothing of this size is ever computed."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def alternating(
    period: int, layers: int, often: str = "sliding_attention", seldom: str = "full_attention"
) -> list[str]:
    """Every `period`-th layer is the other kind."""
    return [seldom if (place + 1) % period == 0 else often for place in range(layers)]


def decoder(model_type: str, *sizes: int, **more: Any) -> Config:
    """sizes: of hidden states, layers, heads, KV heads, the inner layer, vocabulary."""
    hidden, layers, heads, kv_heads, inner, vocabulary = sizes
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        **more,
    }


LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LATENT: Config = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}

DENSE: dict[str, Config] = {
    "SmolLM2-135M": decoder("llama", 576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True),
    "Llama-3.1-8B": decoder("llama", 4096, 32, 32, 8, 14336, 128256, rope_scaling=LLAMA3_ROPE),
    "Llama-3.2-1B": decoder("llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, rope_scaling=LLAMA3_ROPE),
    "Mistral-7B-v0.3": decoder("mistral", 4096, 32, 32, 8, 14336, 32768, rope_theta=1e6),
    "Mistral-Nemo": decoder("mistral", 5120, 40, 32, 8, 14336, 131072, head_dim=128),
    "Qwen2.5-0.5B": decoder("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True),
    "Qwen2.5-7B": decoder("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "Qwen3-4B": decoder("qwen3", 2560, 36, 32, 8, 9728, 151936, head_dim=128, tie_word_embeddings=True),
    "Qwen3-32B": decoder("qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128),
    "Phi-3.5-mini": decoder(
        "phi3", 3072, 32, 32, 32, 8192, 32064, original_max_position_embeddings=4096, sliding_window=262144,
        rope_scaling={"long_factor": [1.1] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    ),
    "phi-2": decoder("phi", 2560, 32, 32, 32, 10240, 51200, partial_rotary_factor=0.4, layer_norm_eps=1e-5),
    "StarCoder2-7B": decoder("starcoder2", 4608, 32, 36, 4, 18432, 49152, norm_epsilon=1e-5, sliding_window=4096),
    "StableLM-2-1.6B": decoder(
        "stablelm", 2048, 24, 32, 32, 5632, 100352, partial_rotary_factor=0.25, layer_norm_eps=1e-5, use_qkv_bias=True,
        use_parallel_residual=False, qk_layernorm=False,
    ),
    "GLM-4-9B-0414": decoder(
        "glm4", 4096, 40, 32, 2, 13696, 151552, head_dim=128, partial_rotary_factor=0.5, attention_bias=True
    ),
    "SmolLM3-3B": decoder(
        "smollm3", 2048, 36, 16, 4, 11008, 128256, no_rope_layer_interval=4,
        no_rope_layers=[int((place + 1) % 4 != 0) for place in range(36)],
    ),
    "OLMo-2-7B": decoder("olmo2", 4096, 32, 32, 32, 11008, 100352),
    "Granite-3.3-8B": decoder(
        "granite", 4096, 40, 32, 8, 12800, 49159, logits_scaling=16.0, attention_multiplier=0.0078125,
        embedding_multiplier=12.0, residual_multiplier=0.22, attention_bias=False, mlp_bias=False,
    ),
    "MiniCPM3-4B": decoder(
        "minicpm3", 2560, 62, 40, 40, 6400, 73448, dim_model_base=256, scale_depth=1.4, scale_emb=12, **(LATENT | {
            "q_lora_rank": 768, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
        }),
        rope_scaling={"type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16,
                      "original_max_position_embeddings": 32768},
    ),
    "GPT-2": {
        "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "layer_norm_epsilon": 1e-5, "vocab_size": 50257,
    },
    "SantaCoder-1B": {
        "model_type": "gpt_bigcode", "n_embd": 2048, "n_layer": 24, "n_inner": 8192, "n_head": 16, "n_positions": 8192,
        "layer_norm_epsilon": 1e-5, "vocab_size": 49152, "multi_query": True,
    },
    "Pythia-6.9B": decoder(
        "gpt_neox", 4096, 32, 32, 32, 16384, 50432, layer_norm_eps=1e-5, rotary_pct=0.25, rotary_emb_base=10000
    ),
}  # fmt: skip

WINDOWS: dict[str, Config] = {
    "Gemma-2-9B": decoder(
        "gemma2", 3584, 42, 16, 8, 14336, 256000, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    ),
    "Gemma-3-1B": decoder(
        "gemma3_text", 1152, 26, 4, 1, 6912, 262144, head_dim=256, query_pre_attn_scalar=256, sliding_window=512,
        sliding_window_pattern=6, rope_local_base_freq=10000.0, rope_theta=1e6,
    ),
    "Gemma-3-27B": {
        "model_type": "gemma3",
        "vocab_size": 262208,
        "text_config": decoder(
            "gemma3_text", 5376, 62, 32, 16, 21504, 262208, head_dim=128, query_pre_attn_scalar=168,
            sliding_window=1024, sliding_window_pattern=6, rope_scaling={"factor": 8.0, "rope_type": "linear"},
        ),
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    },
    "Gemma-3n-E4B": {
        "model_type": "gemma3n",
        "text_config": decoder(
            "gemma3n_text", 2048, 35, 8, 2, 16384, 262400, head_dim=256, num_kv_shared_layers=15,
            vocab_size_per_layer_input=262144, sliding_window=512, rope_local_base_freq=10000.0,
            final_logit_softcapping=30.0, layer_types=alternating(5, 35),
            activation_sparsity_pattern=[0.95] * 10 + [0.0] * 25, hidden_size_per_layer_input=256, altup_num_inputs=4,
            altup_coef_clip=120.0, altup_correct_scale=True, altup_active_idx=0, laurel_rank=64,
        ),
    },
    "gpt-oss-20b": decoder(
        "gpt_oss", 2880, 24, 64, 8, 2880, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, layer_types=alternating(2, 24), rope_theta=150000.0,
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                      "original_max_position_embeddings": 4096, "truncate": False},
    ),
    "Command-R7B": decoder(
        "cohere2", 4096, 32, 32, 8, 14336, 256000, head_dim=128, sliding_window=4096, sliding_window_pattern=4,
        logit_scale=0.25, layer_norm_eps=1e-5,
    ),
    "OLMo-3-7B": decoder("olmo3", 4096, 32, 32, 32, 11008, 100278, sliding_window=4096, layer_types=alternating(4, 32)),
    "EXAONE-4.0-32B": decoder(
        "exaone4", 5120, 64, 40, 8, 27392, 102400, head_dim=128, sliding_window=4096, sliding_window_pattern="LLLG",
        layer_types=alternating(4, 64), rope_scaling={"factor": 16.0, "rope_type": "llama3", "high_freq_factor": 4.0,
                                                      "low_freq_factor": 1.0, "original_max_position_embeddings": 8192},
    ),
    "AFM-3B": {
        "model_type": "afm7", "vocab_size": 153600, "hidden_dim": 2048, "num_layers": 56, "num_kv_reuse_layers": 21,
        "num_heads": 16, "num_kv_heads": 2, "hidden_dim_scale_factor": 3.25, "rope_theta": 500000.0,
    },
}  # fmt: skip

EXPERTS: dict[str, Config] = {
    "Mixtral-8x7B": decoder("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
    "Qwen3-30B-A3B": decoder(
        "qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
    ),
    "Qwen1.5-MoE-A2.7B": decoder(
        "qwen2_moe", 2048, 24, 16, 16, 5632, 151936, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    ),
    "DeepSeek-V3": decoder(
        "deepseek_v3", 7168, 61, 128, 128, 18432, 129280, moe_intermediate_size=2048, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3, **LATENT,
        routed_scaling_factor=2.5, moe_layer_freq=1, norm_topk_prob=True, scoring_func="sigmoid",
        rope_scaling={"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                      "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    ),
    "DeepSeek-V2-Lite": decoder(
        "deepseek_v2", 2048, 27, 16, 16, 10944, 102400, moe_intermediate_size=1408, n_routed_experts=64,
        n_shared_experts=2, num_experts_per_tok=6, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=None,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, routed_scaling_factor=1.0,
        moe_layer_freq=1, rope_scaling={"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                                        "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
    ),
    "Kimi-K2": decoder(
        "kimi_k2", 7168, 61, 64, 64, 18432, 163840, moe_intermediate_size=2048, n_routed_experts=384,
        n_shared_experts=1, num_experts_per_tok=8, n_group=1, topk_group=1, first_k_dense_replace=1, **LATENT,
        routed_scaling_factor=2.827, norm_topk_prob=True, scoring_func="sigmoid",
    ),
    "GLM-4.5-Air": decoder(
        "glm4_moe", 4096, 46, 96, 8, 10944, 151552, head_dim=128, moe_intermediate_size=1408, n_routed_experts=128,
        n_shared_experts=1, num_experts_per_tok=8, n_group=1, topk_group=1, first_k_dense_replace=1,
        routed_scaling_factor=1.0, norm_topk_prob=True, use_qk_norm=False, partial_rotary_factor=0.5,
        attention_bias=True, rope_scaling=None,
    ),
    "GLM-5": decoder(
        "glm_moe_dsa", 6144, 78, 64, 64, 12288, 154880, moe_intermediate_size=2048, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, n_group=1, topk_group=1, first_k_dense_replace=3,
        routed_scaling_factor=2.5, norm_topk_prob=True, q_lora_rank=2048, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=192, v_head_dim=256, index_head_dim=128, index_n_heads=32, index_topk=2048, attention_bias=False,
        scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    ),
    "LongCat-Flash-Lite": decoder(
        "longcat_flash_ngram", 3072, 14, 32, 32, 6144, 131072, ffn_hidden_size=6144, moe_topk=12,
        expert_ffn_hidden_size=1024, n_routed_experts=256, zero_expert_num=128, num_layers=14, q_lora_rank=1536,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, routed_scaling_factor=6.0,
        mla_scale_q_lora=True, mla_scale_kv_lora=True, ngram_vocab_size_ratio=78, emb_neighbor_num=4, emb_split_num=4,
    ),
    "Llama-4-Scout": {
        "model_type": "llama4",
        "text_config": decoder(
            "llama4_text", 5120, 48, 40, 8, 8192, 202048, head_dim=128, attention_bias=False,
            attention_chunk_size=8192, interleave_moe_layer_step=1, intermediate_size_mlp=16384, num_experts_per_tok=1,
            num_local_experts=16, use_qk_norm=True, rope_scaling=LLAMA3_ROPE,
        ),
        "vision_config": {"hidden_size": 1408, "num_hidden_layers": 34},
    },
    "ERNIE-4.5-21B-A3B": decoder(
        "ernie4_5_moe", 2560, 28, 20, 4, 12288, 103424, use_bias=False, moe_num_experts=64, moe_layer_start_index=1,
        moe_layer_end_index=27, moe_layer_interval=1, moe_intermediate_size=1536, moe_k=6, moe_num_shared_experts=2,
    ),
}  # fmt: skip

RECURRENT: dict[str, Config] = {
    "Mamba2-2.7B": {
        "model_type": "mamba2", "num_heads": 80, "head_dim": 64, "vocab_size": 50288, "hidden_size": 2560,
        "intermediate_size": 5120, "state_size": 128, "num_hidden_layers": 64, "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4, "n_groups": 1, "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True,
        "time_step_limit": [0.0, 100.0], "time_step_rank": "auto", "expand": 2,
    },
    "Falcon-H1-7B": decoder(
        "falcon_h1", 3072, 44, 12, 2, 12288, 130048, head_dim=128, mamba_d_ssm=3072, mamba_d_head=128, mamba_n_heads=24,
        mamba_d_state=256, mamba_n_groups=1, mamba_d_conv=4, mamba_rms_norm=False,
    ),
    "Jamba-Mini-1.5": decoder(
        "jamba", 4096, 32, 32, 8, 14336, 65536, attn_layer_offset=4, attn_layer_period=8, expert_layer_offset=1,
        expert_layer_period=2, mamba_d_conv=4, mamba_d_state=16, mamba_expand=2, num_experts=16, num_experts_per_tok=2,
        mamba_dt_rank=256,
    ),
    "LFM2-1.2B": decoder(
        "lfm2", 2048, 16, 32, 8, 12288, 65536, norm_eps=1e-5, conv_bias=False, conv_L_cache=3, block_dim=2048,
        block_multiple_of=256, block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True, block_ff_dim=12288,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
    ),
    "Granite-4.0-H-Tiny": decoder(
        "granitemoehybrid", 1536, 40, 12, 4, 512, 100352, attention_bias=False, embedding_multiplier=12.0,
        attention_multiplier=0.0078125, logits_scaling=6.0, residual_multiplier=0.22,
        layer_types=["attention" if place in (5, 15, 25, 35) else "mamba" for place in range(40)],
        num_local_experts=64, num_experts_per_tok=6, shared_intermediate_size=1024, mamba_n_heads=48, mamba_d_head=64,
        mamba_proj_bias=False, mamba_d_state=128, mamba_d_conv=4, mamba_n_groups=1, mamba_conv_bias=True,
        position_embedding_type="nope",
    ),
    "Qwen3-Next-80B-A3B": decoder(
        "qwen3_next", 2048, 48, 16, 2, 5120, 151936, head_dim=256, partial_rotary_factor=0.25, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, decoder_sparse_step=1,
        mlp_only_layers=[], norm_topk_prob=True, linear_num_value_heads=32, linear_num_key_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, full_attention_interval=4,
    ),
    "Kimi-Linear-48B-A3B": decoder(
        "kimi_linear", 2304, 27, 32, 32, 9216, 163840, head_dim=72, num_experts=256, moe_intermediate_size=1024,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_experts_per_token=8,
        num_shared_experts=1, first_k_dense_replace=1, model_max_length=1048576,
        linear_attn_config={
            "kda_layers": [number for number in range(1, 28) if number % 4 and number != 27],
            "full_attn_layers": [*range(4, 28, 4), 27], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
        },
    ),
    "RecurrentGemma-2B": decoder(
        "recurrent_gemma", 2560, 26, 10, 1, 15360, 256000, attention_bias=False, conv1d_width=4, logits_soft_cap=30.0,
        attention_window_size=2048, block_types=["recurrent", "recurrent", "attention"], lru_width=2560,
    ),
    "RWKV7-1.5B": {
        "model_type": "rwkv7", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 8192, "norm_eps": 1e-5,
        "head_dim": 64, "num_hidden_layers": 24, "a_low_rank_dim": 96, "v_low_rank_dim": 64, "gate_low_rank_dim": 256,
        "decay_low_rank_dim": 96,
    },
    "Nemotron-H-8B": decoder(
        "nemotron_h", 4096, 52, 32, 8, 21504, 131072, attention_bias=False, mamba_num_heads=128, mamba_head_dim=64,
        mamba_proj_bias=False, ssm_state_size=128, conv_kernel=4, n_groups=8, mlp_bias=False, layer_norm_epsilon=1e-5,
        use_bias=False, use_conv_bias=True, head_dim=128, time_step_limit=[0.0, 100.0],
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    ),
}  # fmt: skip

FULL_SIZE: dict[str, Config] = {**DENSE, **WINDOWS, **EXPERTS, **RECURRENT}
