"""Encoders: models whose tokens attend to those behind them, too, as EmbeddingGemma's do.

mlx-lm's modules are causal and read no key that says otherwise. A prompt of such a model runs
alone, in one pass without KV, in which masks are replaced at the seam into attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.kv import attention_seam

WINDOWED = "window_size"
"""Attribute of a body that makes the masks of its layers with a window."""
NO_GENERATION = "each of its tokens attends to those behind it"


def is_bidirectional(config: Mapping[str, Any]) -> bool:
    """Whether a config says that tokens attend to those behind them. For images alone
    (`"vision"`) is no such case."""
    classes = config.get("architectures")
    named = classes if isinstance(classes, list) else []
    return (
        config.get("use_bidirectional_attention") is True
        or config.get("is_causal") is False
        or any("Bidirectional" in str(name) for name in named)
    )


def encoder_of(body: nn.Module, config: Mapping[str, Any]) -> Callable[[list[int]], mx.array]:
    """Return a function from tokens to their hidden states (tokens, dim). `body` is all of the
    model but its head."""
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
