"""Tiny models whose heads divide by two and by three, of four families."""

from __future__ import annotations

from pathlib import Path

from tests import families
from tests.family_configs import DEEPSEEK_V3, FAMILIES, Config

SIZES: Config = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
EXPERTS: Config = {"moe_intermediate_size": 48}
MLA: Config = {"num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 3}
CONFIGS: dict[str, Config] = {
    "llama": {**FAMILIES["llama"], **SIZES, "max_position_embeddings": 2**17},
    "qwen3": {**FAMILIES["qwen3"], **SIZES},
    "qwen3_moe": {**FAMILIES["qwen3_moe"], **SIZES, **EXPERTS},
    "deepseek_v3": {**FAMILIES["deepseek_v3"], **SIZES, **DEEPSEEK_V3, **EXPERTS, **MLA},
    "gpt_oss": {
        **FAMILIES["gpt_oss"],
        **SIZES,
        "intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
SEEDS = {"llama": 2, "qwen3": 1, "qwen3_moe": 0, "deepseek_v3": 1, "gpt_oss": 2}
"""Of 0 to 3, those whose best two logits are nowhere closer than 4e-4 along 512 greedy tokens of
three prompts. Ranks add in another order than one process, which moves logits by 1e-5."""


def save(name: str, directory: Path) -> Path:
    """What `--model` takes."""
    return families.save(name, directory, CONFIGS[name], SEEDS[name])
