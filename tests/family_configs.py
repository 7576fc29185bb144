"""The configs of the 27 families, which the package has for its certificate, and wider ones."""

from __future__ import annotations

from trouper.engine.certificate.family_configs import (
    ALTERNATING,
    BASE,
    DEEPSEEK_V3,
    EXPERTS,
    FAMILIES,
    GATED_DELTA,
    HIDDEN,
    INNER,
    VOCABULARY,
    WINDOW,
    Config,
)

__all__ = [
    "ALTERNATING", "BASE", "DEEPSEEK_V3", "EXPERTS", "FAMILIES", "GATED_DELTA", "HIDDEN", "INNER", "VOCABULARY", "WINDOW", "Config", "wide",
]  # fmt: skip

BY_HIDDEN_SIZE = ("phi3", "lfm2", "qwen2", "cohere2", "mixtral", "jamba", "granitemoehybrid")
"""Models that take the size of a head from the hidden size, whatever head_dim says."""


def wide(config: Config) -> Config:
    """With heads that groups of 32 divide."""
    nested = {key: wide(value) for key, value in config.items() if isinstance(value, dict) and key == "text_config"}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1} if config["model_type"] in BY_HIDDEN_SIZE else {}
    widened = "head_dim" in config and "num_attention_heads" in config
    return {**config, **nested, **heads, **({"head_dim": 32} if widened else {})}
