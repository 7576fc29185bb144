"""Layout of Kimi-VL and Kimi-K2.5: an image keeps its ratio, and black fills it up to whole tokens.

Rules: `navit_resize` (transformers/models/kimi_k25/image_processing_kimi_k25.py), and Kimi-VL's
image_processing_kimi_vl.py in its checkpoint with `pad_input`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs

from trouper.engine.vision.patch_rules import (
    HALVES,
    PatchLayout,
    bound_tokens,
    count_of,
    filter_of,
    largest_shape,
    name_layout,
    read_rules,
    token_of,
)
from trouper.protocol.media import BICUBIC, Detail, ImageShape, ImageSize
from trouper.storage.checkpoint_files import section


@attrs.frozen(kw_only=True)
class NavitLayout(PatchLayout):
    """`max_patches`, `max_side`: bounds of the checkpoint in patches, on all and on one side."""

    max_patches: int
    max_side: int
    resample: int = BICUBIC
    marker: str = "<|media_pad|>"

    @property
    def name(self) -> str:
        return name_layout("navit", self.patches)

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        tokens = bound_tokens(detail, max_tokens)
        return largest_shape(self, partial(self._resize, size), self.max_patches, tokens)

    def _resize(self, size: ImageSize, max_patches: int) -> ImageShape:
        """Shrink to the bounds, and fill up to whole tokens."""
        patch, side = self.patches.patch_size, self.patches.token_size
        longest = self.max_side * patch
        present = max(1, size.height // patch) * max(1, size.width // patch)
        scale = min(
            1.0, math.sqrt(max_patches / present), longest / size.height, longest / size.width
        )
        height, width = (
            min(longest, max(1, int(each * scale))) for each in (size.height, size.width)
        )
        rows, columns = -(-height // side), -(-width // side)
        resized = (rows * side, columns * side)
        scaled = None if resized == (height, width) else (height, width)
        return ImageShape(resized, (1, rows, columns), scaled=scaled, resample=self.resample)


def navit_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> NavitLayout:
    """Raises `ValueError`, as for the older processor that cuts an image's edges off."""
    is_older = config["model_type"] == "kimi_vl"
    if is_older and not preprocessor.get("pad_input", True):
        raise ValueError("its image processor cuts the edges of images off (pad_input)")
    vision = section(config, "vision_config")
    layers = count_of(vision, "vt_num_hidden_layers", count_of(vision, "depth", 27))
    # K2.5's own processor has its parameters in a section, by other names.
    parameters = {**preprocessor, **section(preprocessor, "media_proc_cfg")}
    limit = count_of(parameters, "in_token_limit", 4096 if is_older else 16_384)
    limit = count_of(parameters, "in_patch_limit", limit)
    rules = read_rules(
        parameters,
        mean=HALVES,
        std=HALVES,
        patch_size=count_of(vision, "patch_size", 14),
        merge_size=_merge_size(vision),
    )
    return NavitLayout(
        patches=rules,
        encoder_layers=count_of(vision, "num_hidden_layers", layers),
        image_token=token_of(
            config,
            ("media_placeholder_token_id", "image_token_id", "image_token_index"),
            "<|media_pad|>",
            token_ids,
        ),
        max_patches=count_of(parameters, "max_patches", limit),
        # Kimi-VL refuses an image of 512 patches on a side.
        max_side=count_of(parameters, "patch_limit_on_one_side", 510 if is_older else 512),
        # Kimi-VL's own processor has one filter, whatever its parameters say.
        resample=BICUBIC if is_older else filter_of(parameters, BICUBIC),
    )


def _merge_size(vision: Mapping[str, Any]) -> int:
    """Raises `ValueError` if the sides differ."""
    kernel = vision.get("merge_kernel_size", [2, 2])
    sides = {*kernel} if isinstance(kernel, list | tuple) else {kernel}
    if len(sides) != 1 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError("merge_kernel_size of the image encoder is no square")
    return int(sides.pop())
