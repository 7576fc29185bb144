"""Image layouts: sizes, tokens and spans. Pure integers; no pixels, no MLX.

Rules: Qwen-VL's `smart_resize` (transformers/models/qwen2_vl/image_processing_qwen2_vl.py), GLM's
(glm4v/image_processing_glm4v.py) and Pixtral's longest edge
(pixtral/image_processing_pixtral.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from trouper.engine.vision.gemma_layouts import (
    Gemma3Layout,
    Gemma4Layout,
    gemma3_layout,
    gemma4_layout,
)
from trouper.engine.vision.intern_layout import InternLayout, intern_layout
from trouper.engine.vision.navit_layout import NavitLayout, navit_layout
from trouper.engine.vision.patch_rules import (
    CLIP_MEAN,
    CLIP_STD,
    HALVES,
    NO_ROOM,
    PatchLayout,
    Tokens,
    bound_tokens,
    count_of,
    fit_grid,
    largest_shape,
    name_layout,
    read_rules,
    token_of,
)
from trouper.engine.vision.tile_layouts import (
    TileLayout,
    idefics_layout,
    lfm_layout,
    llama_layout,
)
from trouper.protocol.media import BICUBIC, Detail, ImageShape, ImageSize
from trouper.storage.checkpoint_files import read_json, section

MAX_RATIO = 200
"""Of Qwen-VL's longer side to the shorter one."""


# -- Qwen2-VL to Qwen3.5 ---------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class QwenLayout(PatchLayout):
    """`min_pixels`, `max_pixels`: bounds of the checkpoint on a resized image. Chat templates write
    the tokens around the span."""

    min_pixels: float
    max_pixels: float
    marker: str = "<|image_pad|>"

    @property
    def name(self) -> str:
        return name_layout("qwen-vl", self.patches)

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        if max(size.height, size.width) > MAX_RATIO * min(size.height, size.width):
            raise ValueError(f"one side is more than {MAX_RATIO} times as long as the other")
        side, tokens = self.patches.token_size, bound_tokens(detail, max_tokens)
        if tokens < 1:
            raise ValueError(NO_ROOM)
        max_pixels = min(self.max_pixels, tokens * side**2)
        height, width = self._resize(size, max_pixels)
        rows, columns = height // side, width // side
        if rows * columns > tokens:
            # Rounding up of a short side or to `min_pixels` went beyond the limit.
            rows, columns = fit_grid(size, tokens)
        return ImageShape((rows * side, columns * side), (1, rows, columns))

    def _resize(self, size: ImageSize, max_pixels: float) -> tuple[int, int]:
        """Height and width, multiples of a token's side, as `smart_resize` computes them. Roundings
        are the same."""
        side, pixels = self.patches.token_size, size.height * size.width
        height, width = round(size.height / side) * side, round(size.width / side) * side
        if height * width > max_pixels:
            scale = math.sqrt(pixels / max_pixels)
            height = max(side, math.floor(size.height / scale / side) * side)
            width = max(side, math.floor(size.width / scale / side) * side)
        elif height * width < self.min_pixels:
            scale = math.sqrt(self.min_pixels / pixels)
            height = math.ceil(size.height * scale / side) * side
            width = math.ceil(size.width * scale / side) * side
        return height, width

    def extent(self, shape: ImageShape) -> int:
        _, rows, columns = shape.grid
        return max(rows, columns)


# -- GLM-4.xV ------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class GlmLayout(QwenLayout):
    """Its bounds count the pixels of both frames, which are one image twice."""

    marker: str = "<|image|>"

    @property
    def name(self) -> str:
        return name_layout("glm-v", self.patches)

    def _resize(self, size: ImageSize, max_pixels: float) -> tuple[int, int]:
        side = self.patches.token_size
        if min(size.height, size.width) < side:
            scale = max(side / size.height, side / size.width)
            size = attrs.evolve(
                size, height=int(size.height * scale), width=int(size.width * scale)
            )
        return super()._resize(size, max_pixels)


# -- Mistral 3, Pixtral --------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class PixtralLayout(PatchLayout):
    """`longest_edge`: the checkpoint's bound in pixels on both sides."""

    break_token: int
    end_token: int
    longest_edge: int
    marker: str = "[IMG]"

    @property
    def name(self) -> str:
        return name_layout("pixtral", self.patches)

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        tokens = bound_tokens(detail, max_tokens)
        return largest_shape(self, partial(self._resize, size), self.longest_edge, tokens)

    def _resize(self, size: ImageSize, edge: int) -> ImageShape:
        """Shrink to the edge, and fill up to whole tokens."""
        side, height, width = self.patches.token_size, size.height, size.width
        scale = max(height / edge, width / edge)
        if scale > 1:
            height, width = math.floor(height / scale), math.floor(width / scale)
        # A side of a very long image may shrink to nothing.
        rows, columns = max(1, -(-height // side)), max(1, -(-width // side))
        return ImageShape((rows * side, columns * side), (1, rows, columns))

    def runs(self, shape: ImageShape) -> Iterator[Tokens | int]:
        _, rows, columns = shape.grid
        for row in range(rows):
            yield columns
            yield (self.break_token if row < rows - 1 else self.end_token,)


# -- from a checkpoint ---------------------------------------------------------------------------

Layout = (
    QwenLayout
    | PixtralLayout
    | Gemma3Layout
    | Gemma4Layout
    | NavitLayout
    | TileLayout
    | InternLayout
)


def read_preprocessor(directory: Path) -> Mapping[str, Any]:
    """Parameters of the image processor, {} without a file of them. transformers 5 writes them into
    processor_config.json, which then rules. Raises `ModelUnusable`."""
    newer = directory / "processor_config.json"
    if newer.is_file():
        parameters = section(read_json(newer), "image_processor")
        if parameters:
            return parameters
    older = directory / "preprocessor_config.json"
    return read_json(older) if older.is_file() else {}


def _qwen_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> QwenLayout:
    _require_bicubic(preprocessor)
    vision, size = section(config, "vision_config"), section(preprocessor, "size")
    is_second = str(config["model_type"]).startswith("qwen2")
    shortest, longest = (56**2, 28**2 * 16_384) if is_second else (65_536, 2**24)
    rules = read_rules(
        preprocessor,
        mean=CLIP_MEAN if is_second else HALVES,
        std=CLIP_STD if is_second else HALVES,
        patch_size=count_of(vision, "patch_size", 14 if is_second else 16),
        merge_size=count_of(vision, "spatial_merge_size", 2),
        temporal_patch_size=count_of(vision, "temporal_patch_size", 2),
    )
    return QwenLayout(
        patches=rules,
        encoder_layers=count_of(vision, "depth", 32 if is_second else 27),
        image_token=token_of(config, ("image_token_id",), "<|image_pad|>", token_ids),
        min_pixels=count_of(preprocessor, "min_pixels", count_of(size, "shortest_edge", shortest)),
        max_pixels=count_of(preprocessor, "max_pixels", count_of(size, "longest_edge", longest)),
    )


def _glm_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> GlmLayout:
    _require_bicubic(preprocessor)
    vision, size = section(config, "vision_config"), section(preprocessor, "size")
    rules = read_rules(
        preprocessor,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        patch_size=count_of(vision, "patch_size", 14),
        merge_size=count_of(vision, "spatial_merge_size", 2),
        temporal_patch_size=count_of(vision, "temporal_patch_size", 2),
    )
    frames = rules.temporal_patch_size
    return GlmLayout(
        patches=rules,
        encoder_layers=count_of(vision, "depth", 24),
        image_token=token_of(config, ("image_token_id",), "<|image|>", token_ids),
        min_pixels=count_of(size, "shortest_edge", 112**2) / frames,
        max_pixels=count_of(size, "longest_edge", 28**2 * 15_000) / frames,
    )


def _pixtral_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> PixtralLayout:
    _require_bicubic(preprocessor)
    vision, is_mistral = section(config, "vision_config"), config["model_type"] == "mistral3"
    if vision.get("model_type", "pixtral") != "pixtral":
        raise ValueError(f"images of model_type {config['model_type']!r} are not known yet")
    rules = read_rules(
        preprocessor,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        patch_size=count_of(vision, "patch_size", 14 if is_mistral else 16),
        merge_size=count_of(config, "spatial_merge_size", 2) if is_mistral else 1,
    )
    edge = count_of(vision, "image_size", 1540 if is_mistral else 1024)
    image_keys = ("image_token_index", "image_token_id")
    return PixtralLayout(
        patches=rules,
        encoder_layers=count_of(vision, "num_hidden_layers", 24),
        image_token=token_of(config, image_keys, "[IMG]", token_ids),
        break_token=token_of(config, (), "[IMG_BREAK]", token_ids),
        end_token=token_of(config, (), "[IMG_END]", token_ids),
        longest_edge=count_of(section(preprocessor, "size"), "longest_edge", edge),
    )


def _require_bicubic(preprocessor: Mapping[str, Any]) -> None:
    """Raises `ValueError`."""
    if preprocessor.get("resample", BICUBIC) != BICUBIC:
        raise ValueError("its image processor has a filter other than bicubic")


FAMILIES: Mapping[str, Callable[..., Layout]] = {
    "qwen2_vl": _qwen_layout,
    "qwen2_5_vl": _qwen_layout,
    "qwen3_vl": _qwen_layout,
    "qwen3_vl_moe": _qwen_layout,
    "qwen3_5": _qwen_layout,
    "mistral3": _pixtral_layout,
    "pixtral": _pixtral_layout,
    "gemma3": gemma3_layout,
    "gemma4": gemma4_layout,
    "gemma4_unified": gemma4_layout,
    "kimi_vl": navit_layout,
    "kimi_k25": navit_layout,
    "idefics3": idefics_layout,
    "smolvlm": idefics_layout,
    "lfm2_vl": lfm_layout,
    "lfm2-vl": lfm_layout,
    "llama4": llama_layout,
    "glm4v": _glm_layout,
    "glm4v_moe": _glm_layout,
    "glm46v": _glm_layout,
    "internvl": intern_layout,
    "internvl_chat": intern_layout,
}
"""By `model_type`; those that begin with qwen3_5 are one family."""
MERGES = "its image encoder joins patches between two of its layers, which is not known here"
NO_REFERENCE = "transformers has no code of it with which images could be compared"
REFUSED: Mapping[str, str] = {
    "gemma3n": "its image encoder, MobileNet-V5, is not known here",
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7"), MERGES),
    **dict.fromkeys(("minicpmv", "minicpmo"), NO_REFERENCE),
}
"""Why families that people run take no images."""


def layout_of(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> Layout:
    """`config`: of config.json. `preprocessor`: of `read_preprocessor`; what it lacks has the
    values of the published checkpoints. `token_ids`: ids of the tokenizer's added tokens by text.
    Raises `ValueError` with a reason for a person if the model takes no images here."""
    if "vision_config" not in config:
        raise ValueError("config.json has no vision_config")
    kind = str(config.get("model_type", ""))
    if kind in REFUSED:
        raise ValueError(REFUSED[kind])
    family = "qwen3_5" if kind.startswith("qwen3_5") else kind
    if family not in FAMILIES:
        raise ValueError(f"images of model_type {kind!r} are not known yet")
    try:
        return FAMILIES[family](config, preprocessor, token_ids)
    except (ArithmeticError, LookupError, TypeError) as error:
        # A value of another type, or out of bounds.
        reason = f"its config.json or its image processor's file is malformed: {error}"
        raise ValueError(reason) from error
