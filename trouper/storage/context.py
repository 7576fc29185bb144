"""The context length of a model, from the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trouper.storage.checkpoint_files import LARGEST_DIMENSION, section

CONTEXT_KEYS = (
    "max_position_embeddings",
    "model_max_length",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_positions",
    "n_ctx",
    "max_context_length",
    "block_size",
)
TEXT_PARTS = ("text_config", "llm_config")
# For configs without a limit: recurrent models.
UNBOUNDED_CONTEXT = 32768
# transformers' `max_position_embeddings` for types whose configs omit the value.
DEFAULTS = {
    "gemma2": 8192,
    "gemma3": 131072,
    "gemma3_text": 131072,
    "gemma3n": 32768,
    "gemma3n_text": 32768,
    "gemma4": 131072,
    "gemma4_text": 131072,
    "qwen3_5": 262144,
    "qwen3_5_text": 262144,
    "qwen3_vl": 128000,
    "qwen3_vl_text": 128000,
}
# Types whose positions begin behind the padding token's number.
OFFSET_TYPES = ("camembert", "mpnet", "roberta", "xlm-roberta")
# Kinds of rope whose factor multiplies the named length, as in vLLM.
EXTENDING = ("yarn", "deepseek_yarn")


def context_length(config: Mapping[str, Any]) -> int:
    named = max(
        (named for level in (config, *_texts(config)) if (named := _named(level))),
        default=_default(config),
    )
    if config.get("model_type") in OFFSET_TYPES:
        padding = config.get("pad_token_id")
        return max(1, named - (padding if isinstance(padding, int) else 1) - 1)
    return named


def _texts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [section(config, key) for key in TEXT_PARTS]


def _default(config: Mapping[str, Any]) -> int:
    kinds = [str(level.get("model_type")) for level in (*_texts(config), config)]
    return next((DEFAULTS[kind] for kind in kinds if kind in DEFAULTS), UNBOUNDED_CONTEXT)


def _named(level: Mapping[str, Any]) -> int:
    # Length in one level of a config; 0 for none.
    named = next((value for key in CONTEXT_KEYS if (value := _count(level.get(key)))), 0)
    rope = section(level, "rope_scaling") or section(level, "rope_parameters")
    if rope.get("rope_type", rope.get("type")) in EXTENDING:
        factor, original = rope.get("factor"), _count(rope.get("original_max_position_embeddings"))
        if isinstance(factor, int | float) and 1 <= factor <= LARGEST_DIMENSION:
            return max(named, _count(int(original * factor)))
    return named


def _count(value: object) -> int:
    # A valid number of tokens, or 0.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    sound = isinstance(value, int) and 0 < value <= LARGEST_DIMENSION
    return value if sound and isinstance(value, int) else 0
