"""The context length of a model, from its config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
UNBOUNDED_CONTEXT = 32768
"""Context length for configs that name no limit: those of recurrent models, which have none."""


def context_length(config: Mapping[str, Any]) -> int:
    """Read the maximum number of tokens of a sequence from a model's config."""
    return _nested(config, CONTEXT_KEYS) or UNBOUNDED_CONTEXT


def _nested(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    for level in (config, section(config, "text_config")):
        for key in keys:
            if isinstance(value := level.get(key), int) and 0 < value <= LARGEST_DIMENSION:
                return value
    return None
