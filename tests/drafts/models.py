"""The tiny models whose rows may draft."""

from __future__ import annotations

from pathlib import Path

from tests.families import FAMILIES, save
from tests.family_configs import Config, wide
from tests.heads import CONFIGS, Kind, save_with_head
from tests.ranks import models as of_ranks

HYBRIDS = (
    "qwen3_next",
    "qwen3_5",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "kimi_linear",
    "mamba2",
    "jamba",
    "rwkv7",
    "recurrent_gemma",
    "bailing_moe_linear",
)
"""Models with recurrent state, most of them with attention as well."""
DRAFTING = (
    "llama",
    "gpt_oss",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "gemma3n",
    "phi3",
    "cohere2",
    "llama4_text",
    "mixtral",
    "deepseek_v3",
    "kimi_k25",
    "olmo3",
    "exaone4",
    "glm4_moe",
    "glm4_moe_lite",
    "mimo",
    *HYBRIDS,
)
SPLIT: dict[str, Config] = {
    **of_ranks.CONFIGS,
    "qwen2": {**FAMILIES["qwen2"], "num_attention_heads": 2, "num_key_value_heads": 2},
    "glm4_moe": CONFIGS["glm4_moe"],
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            **FAMILIES["qwen3_5"]["text_config"],
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
    },
    "kimi_k25": {
        "model_type": "kimi_k25",
        "text_config": {**of_ranks.CONFIGS["deepseek_v3"], "model_type": "kimi_k2"},
    },
}
"""Those that two ranks can have together, with heads that can be quantized."""


def saved(name: str, directory: Path, kv_bits: int = 0, head: Kind | None = None) -> str:
    """Written once. With heads that can be quantized if they are to be: those of the tiny models
    are too narrow. `head`: the MTP head that it brings."""
    path = directory / f"{name}{'-wide' * bool(kv_bits)}{_of(head)}"
    config = wide(CONFIGS[name]) if kv_bits else CONFIGS[name]
    if not path.exists():
        save(name, path, config) if head is None else save_with_head(
            name, path, head, config=config
        )
    return str(path)


def saved_to_split(name: str, directory: Path, head: Kind | None = None) -> str:
    """Written once, for two ranks."""
    path, seed = directory / f"{name}-split{_of(head)}", of_ranks.SEEDS.get(name)
    if not path.exists():
        save(name, path, SPLIT[name], seed) if head is None else save_with_head(
            name, path, head, config=SPLIT[name]
        )
    return str(path)


def _of(head: Kind | None) -> str:
    return f"-{head.replace(' ', '-')}" if head else ""


FULL = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "phi3",
    "mixtral",
    "deepseek_v3",
    "kimi_k25",
    "glm4_moe",
    "glm4_moe_lite",
    "mimo",
)
"""Families with full attention in all layers, so that such a model can draft, too."""


TAPPED = tuple(name for name in DRAFTING if name not in ("gemma3n", "rwkv7"))
"""Families whose layers return hidden states, which drafters may read."""


def saved_draft(directory: Path, *, short: bool = False) -> str:
    """A smaller model with the same vocabulary that says something else. `short`: its context is
    shorter than most rows, and it has more logits. Written once."""
    path, shape = (
        directory / f"draft{'-short' * short}",
        {"num_hidden_layers": 2, "max_position_embeddings": 2**17},
    )
    if short:
        shape |= {"max_position_embeddings": 48, "vocab_size": 576}
    return str(path if path.exists() else save("llama", path, {**FAMILIES["llama"], **shape}, 99))
