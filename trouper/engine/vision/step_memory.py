"""Memory that one step of an encoder takes beside its weights, by formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trouper.engine.vision.bounded_attention import MAX_SCORE_BYTES
from trouper.engine.vision.layouts import Layout
from trouper.engine.vision.siglip_tower import IDEFICS_DEFAULTS
from trouper.protocol.media import ImageSize

FLOAT32 = 4
LARGEST = tuple(ImageSize(16_384, height, "png") for height in (16_384, 12_288, 6554))
"""Of a family with tiles one of them has most: 3 x 3, 3 x 4 or 2 x 5."""
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
    patches = max(rules.count_patches(layout.shape(size, "high", max_tokens)) for size in LARGEST)
    piece_patches = min(patches, layout.piece_patches or patches)
    inputs = rules.patch_values
    if not layout.encoder_layers:
        return FLOAT32 * UNIFIED_COPIES * patches * inputs
    dim, inner_dim = _dims(vision)
    hidden = patches * HIDDEN_VECTORS * dim
    inner = piece_patches * INNER_VECTORS * inner_dim
    layer_bytes = FLOAT32 * hidden + number_bytes * inner + MAX_SCORE_BYTES
    return max(layer_bytes, FLOAT32 * PIXEL_COPIES * patches * inputs)


def _dims(vision: Mapping[str, Any]) -> tuple[int, int]:
    """Sizes of a patch's vector, also within an MLP. Qwen2-VL's `hidden_size` is the text's."""
    dim = vision.get("embed_dim") or vision.get("vt_hidden_size")
    dim = dim or vision.get("hidden_size", IDEFICS_DEFAULTS["hidden_size"])
    inner = vision.get("vt_intermediate_size") or vision.get("intermediate_size")
    return dim, inner or int(dim * vision.get("mlp_ratio", 4))
