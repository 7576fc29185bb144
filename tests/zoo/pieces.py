"""What configs of the zoo share: sizes, and groups of fields that come together."""

from __future__ import annotations

from tests.family_configs import (
    BASE,
    DEEPSEEK_V3,
    EXPERTS,
    GATED_DELTA,
    HIDDEN,
    INNER,
    VOCABULARY,
    WINDOW,
    Config,
)

__all__ = [
    "BASE",
    "DEEPSEEK_V3",
    "EXPERTS",
    "GATED_DELTA",
    "HIDDEN",
    "INNER",
    "LATENT",
    "LATENT_EXPERTS",
    "NAMED_EXPERTS",
    "SHORT_CONTEXT",
    "VOCABULARY",
    "WINDOW",
    "Config",
    "kinds",
]

SHORT_CONTEXT = 32
"""Maximum positions of configs whose rotary embedding changes beyond them: every prompt of the zoo
passes this."""

LATENT: Config = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
"""Multi-head latent attention."""

NAMED_EXPERTS: Config = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
"""Experts as the DeepSeek configs name them."""

LATENT_EXPERTS: Config = {**LATENT, **NAMED_EXPERTS}


def kinds(*names: str, layers: int = 4) -> list[str]:
    """Types of layers, repeated."""
    return [names[place % len(names)] for place in range(layers)]
