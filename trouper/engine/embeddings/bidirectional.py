"""Encoders whose tokens attend to later ones, such as EmbeddingGemma.

mlx-lm's modules are causal. A prompt runs alone, in one pass without KV, with masks replaced at the
call of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.kv import attention_seam

WINDOWED = "window_size"
"""Attribute of a body with windowed layers."""
NO_GENERATION = "each of its tokens attends to those behind it"


def is_bidirectional(config: Mapping[str, Any]) -> bool:
    """False for images alone (`"vision"`)."""
    classes = config.get("architectures")
    named = classes if isinstance(classes, list) else []
    return (
        config.get("use_bidirectional_attention") is True
        or config.get("is_causal") is False
        or any("Bidirectional" in str(name) for name in named)
    )


def encoder_of(body: nn.Module, config: Mapping[str, Any]) -> Callable[[list[int]], mx.array]:
    """Return a function from tokens to hidden states (tokens, dim). `body`: the model without the
    head."""
    attention_seam.install(body)
    window = None
    if hasattr(body, WINDOWED):
        # transformers halves the window, which is that of both sides
        # (configuration_gemma3.py, masking_utils.py).
        window = int(config["sliding_window"]) // 2 + 1
        # A mask as an array then says that a layer has a window, whatever the length.
        setattr(body, WINDOWED, 1)

    def encode(tokens: list[int]) -> mx.array:
        with attention_seam.bidirectional(window):
            hidden: mx.array = body(mx.array([tokens]))
        return hidden[0]

    return encode
