"""Memory that one step of an encoder takes beside its weights, by formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trouper.engine.vision.bounded_attention import MAX_SCORE_BYTES
from trouper.engine.vision.layouts import Layout
from trouper.engine.vision.patches import CHANNELS
from trouper.protocol.media import ImageSize

FLOAT32 = 4
LARGEST = ImageSize(16_384, 16_384, "png")
# Measured on a CPU in float32 and on an H200 in bfloat16 (benchmarks/RESULTS.md).
HIDDEN_VECTORS, INNER_VECTORS = 20, 3
"""Vectors of the layer's size for each patch, mostly in float32, for rotations; and of its MLP's
size for each patch of a piece."""
PIXEL_COPIES = 4
"""Of the input in float32 while it becomes patches."""
UNIFIED_COPIES = 12
"""Of the input of an encoder without layers, which normalises the pixels of each token."""


def encoder_step_bytes(
    vision: Mapping[str, Any], layout: Layout, max_tokens: int, number_bytes: int
) -> int:
    """Return the most bytes of a step that encodes the largest image of `max_tokens` tokens.
    `vision`: the encoder's config. `number_bytes`: of an activation."""
    rules = layout.patches
    height, width = layout.shape(LARGEST, "high", max_tokens).resized
    patches = (height // rules.patch_size) * (width // rules.patch_size)
    piece_patches = min(patches, layout.piece_patches or patches)
    inputs = CHANNELS * rules.patch_size**2 * rules.temporal_patch_size
    if not layout.encoder_layers:
        return FLOAT32 * UNIFIED_COPIES * patches * inputs
    hidden = patches * HIDDEN_VECTORS * vision["hidden_size"]
    inner = piece_patches * INNER_VECTORS * vision["intermediate_size"]
    layer_bytes = FLOAT32 * hidden + number_bytes * inner + MAX_SCORE_BYTES
    return max(layer_bytes, FLOAT32 * PIXEL_COPIES * patches * inputs)
