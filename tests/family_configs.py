"""The configs of the 27 families, which the package has for its certificate, and wider ones."""

from __future__ import annotations

import os

from trouper_lab.engine_programs.family_configs import (
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
    "ALTERNATING",
    "BASE",
    "DEEPSEEK_V3",
    "EVERY",
    "EXPERTS",
    "FAMILIES",
    "GATED_DELTA",
    "HIDDEN",
    "INNER",
    "LONG",
    "ONE_HALF",
    "OTHER_HALF",
    "SOME_FAMILIES",
    "VOCABULARY",
    "WINDOW",
    "Config",
    "wide",
]

LONG = bool(os.environ.get("TROUPER_LONG_TESTS"))
"""Whether tests play their long versions, as `just test-long` does."""
OF_EACH_KIND = (
    "llama",
    "deepseek_v3",
    "gemma3_text",
    "gemma3n",
    "gpt_oss",
    "falcon_h1",
    "lfm2",
    "mamba2",
    "qwen3_next",
    "recurrent_gemma",
)
"""One of each kind of cache: full, latent, rings, shared, with sinks; states alone and beside keys
and values."""
EVERY = LONG or bool(os.environ.get("TROUPER_EVERY_FAMILY"))
"""Whether all families are played in all ways: in the long version, and on a device that is to be
tested (`just test-device`)."""
SOME_FAMILIES = tuple(FAMILIES) if EVERY else OF_EACH_KIND
"""One of each kind of cache, or all families."""
ONE_HALF, OTHER_HALF = (
    (SOME_FAMILIES, SOME_FAMILIES)
    if EVERY
    else (OF_EACH_KIND[::2], OF_EACH_KIND[1::2])
    if os.environ.get("TROUPER_UNSHRUNK")
    else (("llama", "gpt_oss"), ("deepseek_v3", "recurrent_gemma"))
)
"""Families that are played in one way or another, each of them in half of the ways: full keys and
rings with sinks; latents, and states beside windows. All families in all ways in the long version,
and half of each kind for a mutant."""

BY_HIDDEN_SIZE = ("phi3", "lfm2", "qwen2", "cohere2", "mixtral", "jamba", "granitemoehybrid")
"""Models that take the size of a head from the hidden size, whatever head_dim says."""


def wide(config: Config) -> Config:
    """With heads that groups of 32 divide."""
    nested = {
        key: wide(value)
        for key, value in config.items()
        if isinstance(value, dict) and key == "text_config"
    }
    heads = (
        {"num_attention_heads": 2, "num_key_value_heads": 1}
        if config["model_type"] in BY_HIDDEN_SIZE
        else {}
    )
    widened = "head_dim" in config and "num_attention_heads" in config
    return {**config, **nested, **heads, **({"head_dim": 32} if widened else {})}
