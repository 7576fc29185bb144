"""Layouts of Gemma 3 and Gemma 4: an image's tokens stand between two marks.

Rules: Gemma 3's square (transformers/models/gemma3/processing_gemma3.py) and Gemma 4's budgets
(transformers/models/gemma4/image_processing_pil_gemma4.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from trouper.engine.vision.patch_rules import (
    HALVES,
    NO_ROOM,
    PatchLayout,
    Tokens,
    bound_tokens,
    count_of,
    filter_of,
    name_layout,
    read_rules,
    token_of,
)
from trouper.protocol.media import BICUBIC, BILINEAR, Detail, ImageShape, ImageSize
from trouper.storage.checkpoint_files import section

SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Bounds on the tokens of an image for which Gemma 4 was trained."""


@attrs.frozen(kw_only=True)
class MarkedLayout(PatchLayout):
    start_token: int
    end_token: int

    def runs(self, shape: ImageShape) -> Iterator[Tokens | int]:
        yield (self.start_token,)
        yield shape.view_tokens
        yield (self.end_token,)


@attrs.frozen(kw_only=True)
class Gemma3Layout(MarkedLayout):
    """`tile`: side in pixels of the square to which every image is resized. Crops of long images
    ("pan and scan") are off, as in the published processors."""

    atomic: bool = True
    tile: int
    resample: int = BILINEAR
    marker: str = "<start_of_image>"
    around: str = "\n\n"
    """Text that the processor writes before and behind the marker."""

    @property
    def name(self) -> str:
        return name_layout("gemma3", self.patches)

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:  # noqa: ARG002
        rows = self.tile // self.patches.token_size
        if rows**2 > bound_tokens(detail, max_tokens):
            raise ValueError(NO_ROOM)
        return ImageShape((self.tile, self.tile), (1, rows, rows), resample=self.resample)


@attrs.frozen(kw_only=True)
class Gemma4Layout(MarkedLayout):
    """`soft_tokens`: the checkpoint's bound on the tokens of an image, without marks.
    Images of the smallest models are not atomic."""

    soft_tokens: int
    resample: int = BICUBIC
    marker: str = "<|image|>"

    @property
    def name(self) -> str:
        return name_layout("gemma4", self.patches)

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        """Fill the largest of the trained bounds. Raises `ValueError`."""
        limit = min(bound_tokens(detail, max_tokens), self.soft_tokens)
        bounds = [tokens for tokens in SOFT_TOKENS if tokens <= limit]
        if not bounds:
            raise ValueError(NO_ROOM)
        rows, columns = self._grid(size, bounds[-1])
        side = self.patches.token_size
        return ImageShape((rows * side, columns * side), (1, rows, columns), resample=self.resample)

    def _grid(self, size: ImageSize, tokens: int) -> tuple[int, int]:
        """Rows and columns as `get_aspect_ratio_preserving_size` computes them. Roundings are the
        same."""
        height, width, side = size.height, size.width, self.patches.token_size
        factor = math.sqrt(tokens * side**2 / (height * width))
        rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if not rows:
            return 1, min(width // height, tokens)
        if not columns:
            return min(height // width, tokens), 1
        return rows, columns


def gemma3_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> Gemma3Layout:
    vision, size = section(config, "vision_config"), section(preprocessor, "size")
    if preprocessor.get("do_pan_and_scan"):
        raise ValueError("its image processor cuts long images in parts (do_pan_and_scan)")
    image_side, patch_size = count_of(vision, "image_size", 896), count_of(vision, "patch_size", 14)
    # `avg_pool` of the projector makes squares of patches.
    rows = math.isqrt(count_of(config, "mm_tokens_per_image", 256))
    merge_size = image_side // patch_size // rows
    if rows * merge_size * patch_size != image_side or size.get("height", image_side) != image_side:
        raise ValueError("its image_size, patch_size and mm_tokens_per_image make no grid")
    return Gemma3Layout(
        patches=read_rules(
            preprocessor, mean=HALVES, std=HALVES, patch_size=patch_size, merge_size=merge_size
        ),
        encoder_layers=count_of(vision, "num_hidden_layers", 27),
        image_token=token_of(
            config, ("image_token_index", "image_token_id"), "<image_soft_token>", token_ids
        ),
        start_token=token_of(
            config, ("boi_token_index", "boi_token_id"), "<start_of_image>", token_ids
        ),
        end_token=token_of(
            config, ("eoi_token_index", "eoi_token_id"), "<end_of_image>", token_ids
        ),
        tile=image_side,
        resample=filter_of(preprocessor, BILINEAR),
    )


def gemma4_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> Gemma4Layout:
    vision, text = section(config, "vision_config"), section(config, "text_config")
    is_unified = config["model_type"] == "gemma4_unified"
    attention = text.get("use_bidirectional_attention", "vision" if is_unified else None)
    if attention not in (None, "vision"):
        raise ValueError(f"use_bidirectional_attention {attention!r} is not known here")
    # The unified model has no layers of an encoder.
    layers = 0 if is_unified else count_of(vision, "num_hidden_layers", 16)
    rules = read_rules(
        preprocessor,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        patch_size=count_of(vision, "patch_size", 16),
        merge_size=count_of(vision, "pooling_kernel_size", 3),
    )
    return Gemma4Layout(
        patches=rules,
        encoder_layers=layers,
        image_token=token_of(config, ("image_token_id",), "<|image|>", token_ids),
        start_token=token_of(config, ("boi_token_id",), "<|image>", token_ids),
        end_token=token_of(config, ("eoi_token_id",), "<image|>", token_ids),
        soft_tokens=count_of(preprocessor, "max_soft_tokens", 280),
        atomic=attention == "vision",
        resample=filter_of(preprocessor, BICUBIC),
    )
