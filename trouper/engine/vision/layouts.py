"""Image layouts of families: sizes, tokens and spans. Pure integers; no pixels, no MLX.

Rules, of transformers/models: Qwen-VL's `smart_resize` (qwen2_vl/image_processing_qwen2_vl.py),
Pixtral's longest edge (pixtral/image_processing_pixtral.py), Gemma 3's square
(gemma3/processing_gemma3.py) and Gemma 4's budgets (gemma4/image_processing_pil_gemma4.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import attrs

from trouper.protocol.media import (
    BICUBIC,
    BILINEAR,
    Detail,
    ImageShape,
    ImageSize,
    MediaSpan,
)
from trouper.storage.checkpoint_files import read_json, section

LOW_DETAIL_TOKENS = 256
VERSION = 1
"""Of these rules. Part of each digest."""
MAX_RATIO = 200
"""Of Qwen-VL's longer side to the shorter one."""
HALVES = (0.5, 0.5, 0.5)
"""Qwen3-VL's mean and deviation of each color."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@attrs.frozen
class PatchRules:
    """How pixels become the encoder's input: (rgb * `rescale` - `mean`) / `std`, cut into patches
    of `patch_size` pixels, `merge_size` x `merge_size` of which make one embedded token.
    `temporal_patch_size`: number of times that an image is repeated as frames."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float
    patch_size: int
    merge_size: int
    temporal_patch_size: int = 1

    @property
    def token_size(self) -> int:
        """Side in pixels of the square of one embedded token."""
        return self.patch_size * self.merge_size

    def count_pieces(self, shape: ImageShape, piece_patches: int) -> int:
        height, width = shape.resized
        patches = (height // self.patch_size) * (width // self.patch_size)
        return -(-patches // (piece_patches or patches))


def _name_layout(family: str, rules: PatchRules) -> str:
    """Other means or patches make other vectors of the same file."""
    parameters = sha256(repr(rules).encode()).hexdigest()
    return f"{family}-{VERSION}-{parameters[:16]}"


def _bound_tokens(detail: Detail, max_tokens: int) -> int:
    """`high` has no right beyond the operator's bound, and `auto` is `high`."""
    return min(max_tokens, LOW_DETAIL_TOKENS) if detail == "low" else max_tokens


# -- Qwen3-VL, Qwen3.5 ---------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class QwenLayout:
    """`min_pixels`, `max_pixels`: bounds of the checkpoint on a resized image. Chat templates write
    the tokens around the span."""

    patches: PatchRules
    encoder_layers: int
    piece_patches: int = 0
    """Patches of a layer in one piece of the encoder's work; 0: all of the layer."""
    image_token: int
    min_pixels: int
    max_pixels: int
    marker: str = "<|image_pad|>"

    @property
    def name(self) -> str:
        return _name_layout("qwen-vl", self.patches)

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        """Raises `ValueError`."""
        if max(size.height, size.width) > MAX_RATIO * min(size.height, size.width):
            raise ValueError(f"one side is more than {MAX_RATIO} times as long as the other")
        side, tokens = self.patches.token_size, _bound_tokens(detail, max_tokens)
        if tokens < 1:
            raise ValueError("the limit of tokens has no room for an image")
        max_pixels = min(self.max_pixels, tokens * side**2)
        height, width = self._resize(size, max_pixels)
        rows, columns = height // side, width // side
        if rows * columns > tokens:
            # Rounding up of a short side or to `min_pixels` went beyond the limit.
            rows, columns = _fit_grid(size, tokens)
        return ImageShape((rows * side, columns * side), (1, rows, columns))

    def _resize(self, size: ImageSize, max_pixels: int) -> tuple[int, int]:
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

    def num_tokens(self, shape: ImageShape) -> int:
        _, rows, columns = shape.grid
        return rows * columns

    def num_pieces(self, shape: ImageShape) -> int:
        # One more for the patches before the first layer.
        return 1 + self.encoder_layers * self.patches.count_pieces(shape, self.piece_patches)

    def span(self, start: int, shape: ImageShape, digest: bytes) -> MediaSpan:
        _, rows, columns = shape.grid
        return MediaSpan(
            start=start,
            tokens=(self.image_token,) * (rows * columns),
            embedded=((0, rows * columns),),
            digest=digest,
            shape=shape,
            extent=max(rows, columns),
        )


def _fit_grid(size: ImageSize, tokens: int) -> tuple[int, int]:
    """Rows and columns of at most so many tokens, near the image's ratio."""
    if size.height > size.width:
        columns = max(1, math.floor(math.sqrt(tokens * size.width / size.height)))
        return tokens // columns, columns
    rows = max(1, math.floor(math.sqrt(tokens * size.height / size.width)))
    return rows, tokens // rows


# -- Mistral 3, Pixtral --------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class PixtralLayout:
    """`longest_edge`: the checkpoint's bound in pixels on both sides."""

    patches: PatchRules
    encoder_layers: int
    piece_patches: int = 0
    """Patches of a layer in one piece of the encoder's work; 0: all of the layer."""
    image_token: int
    break_token: int
    end_token: int
    longest_edge: int
    marker: str = "[IMG]"

    @property
    def name(self) -> str:
        return _name_layout("pixtral", self.patches)

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        """Raises `ValueError`."""
        tokens = _bound_tokens(detail, max_tokens)
        # The number of tokens never falls as the edge grows.
        edge = bisect_right(
            range(1, self.longest_edge + 1),
            tokens,
            key=lambda edge: self.num_tokens(self._resize(size, edge)),
        )
        if not edge:
            raise ValueError("the limit of tokens has no room for an image")
        return self._resize(size, edge)

    def _resize(self, size: ImageSize, edge: int) -> ImageShape:
        """Shrink to the edge, and fill up to whole tokens."""
        side, height, width = self.patches.token_size, size.height, size.width
        scale = max(height / edge, width / edge)
        if scale > 1:
            height, width = math.floor(height / scale), math.floor(width / scale)
        # A side of a very long image may shrink to nothing.
        rows, columns = max(1, -(-height // side)), max(1, -(-width // side))
        return ImageShape((rows * side, columns * side), (1, rows, columns))

    def num_tokens(self, shape: ImageShape) -> int:
        _, rows, columns = shape.grid
        return rows * (columns + 1)

    def num_pieces(self, shape: ImageShape) -> int:
        # One more for the patches before the first layer.
        return 1 + self.encoder_layers * self.patches.count_pieces(shape, self.piece_patches)

    def span(self, start: int, shape: ImageShape, digest: bytes) -> MediaSpan:
        """Each row ends with a break, the last one with the image's end."""
        _, rows, columns = shape.grid
        row = (*(self.image_token,) * columns, self.break_token)
        tokens = (*(row * rows)[:-1], self.end_token)
        return MediaSpan(
            start=start,
            tokens=tokens,
            embedded=tuple((index * len(row), columns) for index in range(rows)),
            digest=digest,
            shape=shape,
            extent=len(tokens),
        )


# -- Gemma 3, Gemma 4 ----------------------------------------------------------------------------

SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Bounds on the tokens of an image for which Gemma 4 was trained."""


def _gemma_span(
    start: int, tokens: tuple[int, ...], shape: ImageShape, digest: bytes, *, atomic: bool
) -> MediaSpan:
    """`tokens`: with a mark at each end."""
    return MediaSpan(
        start=start,
        tokens=tokens,
        embedded=((1, len(tokens) - 2),),
        digest=digest,
        shape=shape,
        extent=len(tokens),
        atomic=atomic,
    )


@attrs.frozen(kw_only=True)
class Gemma3Layout:
    """`side`: pixels of the square to which every image is resized. Crops of long images ("pan and
    scan") are off, as in the published processors."""

    patches: PatchRules
    encoder_layers: int
    piece_patches: int = 0
    """Patches of a layer in one piece of the encoder's work; 0: all of the layer."""
    image_token: int
    start_token: int
    end_token: int
    side: int
    resample: int = BILINEAR
    marker: str = "<start_of_image>"
    around: str = "\n\n"
    """Text that the processor writes before and behind the marker."""

    @property
    def name(self) -> str:
        return _name_layout("gemma3", self.patches)

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:  # noqa: ARG002
        """Raises `ValueError`."""
        rows = self.side // self.patches.token_size
        if rows**2 > _bound_tokens(detail, max_tokens):
            raise ValueError("the limit of tokens has no room for an image")
        return ImageShape((self.side, self.side), (1, rows, rows), self.resample)

    def num_tokens(self, shape: ImageShape) -> int:
        _, rows, columns = shape.grid
        return rows * columns + 2

    def num_pieces(self, shape: ImageShape) -> int:
        # One more for the patches before the first layer.
        return 1 + self.encoder_layers * self.patches.count_pieces(shape, self.piece_patches)

    def span(self, start: int, shape: ImageShape, digest: bytes) -> MediaSpan:
        _, rows, columns = shape.grid
        tokens = (self.start_token, *(self.image_token,) * (rows * columns), self.end_token)
        return _gemma_span(start, tokens, shape, digest, atomic=True)


@attrs.frozen(kw_only=True)
class Gemma4Layout:
    """`soft_tokens`: the checkpoint's bound on the tokens of an image, without marks. `atomic`:
    whether tokens of an image attend to later ones; the smallest models' do not."""

    patches: PatchRules
    encoder_layers: int
    piece_patches: int = 0
    """Patches of a layer in one piece of the encoder's work; 0: all of the layer."""
    image_token: int
    start_token: int
    end_token: int
    soft_tokens: int
    atomic: bool
    resample: int = BICUBIC
    marker: str = "<|image|>"

    @property
    def name(self) -> str:
        return _name_layout("gemma4", self.patches)

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        """Fill the largest of the trained bounds. Raises `ValueError`."""
        limit = min(_bound_tokens(detail, max_tokens), self.soft_tokens)
        bounds = [tokens for tokens in SOFT_TOKENS if tokens <= limit]
        if not bounds:
            raise ValueError("the limit of tokens has no room for an image")
        rows, columns = self._grid(size, bounds[-1])
        side = self.patches.token_size
        return ImageShape((rows * side, columns * side), (1, rows, columns), self.resample)

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

    def num_tokens(self, shape: ImageShape) -> int:
        _, rows, columns = shape.grid
        return rows * columns + 2

    def num_pieces(self, shape: ImageShape) -> int:
        # One more for the patches before the first layer.
        return 1 + self.encoder_layers * self.patches.count_pieces(shape, self.piece_patches)

    def span(self, start: int, shape: ImageShape, digest: bytes) -> MediaSpan:
        _, rows, columns = shape.grid
        tokens = (self.start_token, *(self.image_token,) * (rows * columns), self.end_token)
        return _gemma_span(start, tokens, shape, digest, atomic=self.atomic)


# -- from a checkpoint ---------------------------------------------------------------------------

Layout = QwenLayout | PixtralLayout | Gemma3Layout | Gemma4Layout


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


def layout_of(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> Layout:
    """`config`: of config.json. `preprocessor`: of `read_preprocessor`; what it lacks has the
    values of the published checkpoints. `token_ids`: ids of the tokenizer's added tokens by text.
    Raises `ValueError` with a reason for a person if the model takes no images here."""
    if "vision_config" not in config:
        raise ValueError("config.json has no vision_config")
    kind = str(config.get("model_type", ""))
    if kind == "gemma3":
        return _gemma3_layout(config, preprocessor, token_ids)
    if kind in ("gemma4", "gemma4_unified"):
        return _gemma4_layout(config, preprocessor, token_ids)
    if kind == "gemma3n":
        raise ValueError("its image encoder, MobileNet-V5, is not known here")
    if preprocessor.get("resample", BICUBIC) != BICUBIC:
        raise ValueError("its image processor has a filter other than bicubic")
    if kind in ("qwen3_vl", "qwen3_vl_moe") or kind.startswith("qwen3_5"):
        return _qwen_layout(config, preprocessor, token_ids)
    encoder = section(config, "vision_config").get("model_type", "pixtral")
    if kind in ("mistral3", "pixtral") and encoder == "pixtral":
        return _pixtral_layout(config, preprocessor, token_ids)
    raise ValueError(f"images of model_type {kind!r} are not known yet")


def _qwen_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> QwenLayout:
    vision, size = section(config, "vision_config"), section(preprocessor, "size")
    rules = _read_rules(
        preprocessor,
        mean=HALVES,
        std=HALVES,
        patch_size=_count(vision, "patch_size", 16),
        merge_size=_count(vision, "spatial_merge_size", 2),
        temporal_patch_size=_count(vision, "temporal_patch_size", 2),
    )
    return QwenLayout(
        patches=rules,
        encoder_layers=_count(vision, "depth", 27),
        image_token=_token(config, ("image_token_id",), "<|image_pad|>", token_ids),
        min_pixels=_count(preprocessor, "min_pixels", _count(size, "shortest_edge", 65_536)),
        max_pixels=_count(preprocessor, "max_pixels", _count(size, "longest_edge", 2**24)),
    )


def _pixtral_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> PixtralLayout:
    vision, is_mistral = section(config, "vision_config"), config["model_type"] == "mistral3"
    rules = _read_rules(
        preprocessor,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        patch_size=_count(vision, "patch_size", 14 if is_mistral else 16),
        merge_size=_count(config, "spatial_merge_size", 2) if is_mistral else 1,
    )
    edge = _count(vision, "image_size", 1540 if is_mistral else 1024)
    image_keys = ("image_token_index", "image_token_id")
    return PixtralLayout(
        patches=rules,
        encoder_layers=_count(vision, "num_hidden_layers", 24),
        image_token=_token(config, image_keys, "[IMG]", token_ids),
        break_token=_token(config, (), "[IMG_BREAK]", token_ids),
        end_token=_token(config, (), "[IMG_END]", token_ids),
        longest_edge=_count(section(preprocessor, "size"), "longest_edge", edge),
    )


def _gemma3_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> Gemma3Layout:
    vision, size = section(config, "vision_config"), section(preprocessor, "size")
    if preprocessor.get("do_pan_and_scan"):
        raise ValueError("its image processor cuts long images in parts (do_pan_and_scan)")
    image_side, patch_size = _count(vision, "image_size", 896), _count(vision, "patch_size", 14)
    # `avg_pool` of the projector makes squares of patches.
    rows = math.isqrt(_count(config, "mm_tokens_per_image", 256))
    merge_size = image_side // patch_size // rows
    if rows * merge_size * patch_size != image_side or size.get("height", image_side) != image_side:
        raise ValueError("its image_size, patch_size and mm_tokens_per_image make no grid")
    return Gemma3Layout(
        patches=_read_rules(
            preprocessor, mean=HALVES, std=HALVES, patch_size=patch_size, merge_size=merge_size
        ),
        encoder_layers=_count(vision, "num_hidden_layers", 27),
        image_token=_token(
            config, ("image_token_index", "image_token_id"), "<image_soft_token>", token_ids
        ),
        start_token=_token(
            config, ("boi_token_index", "boi_token_id"), "<start_of_image>", token_ids
        ),
        end_token=_token(config, ("eoi_token_index", "eoi_token_id"), "<end_of_image>", token_ids),
        side=image_side,
        resample=_filter(preprocessor, BILINEAR),
    )


def _gemma4_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> Gemma4Layout:
    vision, text = section(config, "vision_config"), section(config, "text_config")
    is_unified = config["model_type"] == "gemma4_unified"
    attention = text.get("use_bidirectional_attention", "vision" if is_unified else None)
    if attention not in (None, "vision"):
        raise ValueError(f"use_bidirectional_attention {attention!r} is not known here")
    # The unified model has no layers of an encoder.
    layers = 0 if is_unified else _count(vision, "num_hidden_layers", 16)
    rules = _read_rules(
        preprocessor,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        patch_size=_count(vision, "patch_size", 16),
        merge_size=_count(vision, "pooling_kernel_size", 3),
    )
    return Gemma4Layout(
        patches=rules,
        encoder_layers=layers,
        image_token=_token(config, ("image_token_id",), "<|image|>", token_ids),
        start_token=_token(config, ("boi_token_id",), "<|image>", token_ids),
        end_token=_token(config, ("eoi_token_id",), "<image|>", token_ids),
        soft_tokens=_count(preprocessor, "max_soft_tokens", 280),
        atomic=attention == "vision",
        resample=_filter(preprocessor, BICUBIC),
    )


def _filter(preprocessor: Mapping[str, Any], default: int) -> int:
    """Pillow's number. Raises `ValueError`."""
    value = preprocessor.get("resample", default)
    if value not in (BILINEAR, BICUBIC):
        raise ValueError("its image processor has a filter other than bilinear and bicubic")
    return int(value)


def _read_rules(
    preprocessor: Mapping[str, Any],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int = 1,
) -> PatchRules:
    """Sizes of patches are those of config.json, for which the encoder's weights are made."""
    rescale = _numbers(preprocessor, "rescale_factor", (1 / 255,), 1)[0]
    mean = _numbers(preprocessor, "image_mean", mean, 3)
    std = _numbers(preprocessor, "image_std", std, 3)
    if not preprocessor.get("do_rescale", True):
        rescale = 1.0
    if not preprocessor.get("do_normalize", True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if not all(std):
        raise ValueError("image_std of the image processor has a zero")
    return PatchRules(
        mean=mean,
        std=std,
        rescale=rescale,
        patch_size=patch_size,
        merge_size=merge_size,
        temporal_patch_size=temporal_patch_size,
    )


def _count(parameters: Mapping[str, Any], key: str, default: int) -> int:
    """Raises `ValueError`."""
    value = parameters.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ValueError(f"{key} of the image encoder or processor is no positive integer")
    return value


def _numbers(
    parameters: Mapping[str, Any], key: str, default: tuple[float, ...], length: int
) -> tuple[float, ...]:
    """Raises `ValueError`."""
    value = parameters.get(key)
    if value is None:
        return default
    values = value if isinstance(value, list) else [value] * length
    are_numbers = all(isinstance(each, int | float) and math.isfinite(each) for each in values)
    if len(values) != length or not are_numbers:
        raise ValueError(f"{key} of the image processor is not made of {length} numbers")
    return tuple(float(each) for each in values)


def _token(
    config: Mapping[str, Any], keys: tuple[str, ...], text: str, token_ids: Mapping[str, int]
) -> int:
    """The tokenizer's id, or that of the config. Raises `ValueError`."""
    ids = [token_ids.get(text), *(config.get(key) for key in keys)]
    for value in ids:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    raise ValueError(f"the tokenizer has no token {text}")
