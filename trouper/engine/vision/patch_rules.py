"""Patches of an image and a checkpoint's parameters of them, for the layouts of all families."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Any

import attrs

from trouper.protocol.media import CHANNELS, Detail, ImageShape, ImageSize, MediaSpan

LOW_DETAIL_TOKENS = 256
VERSION = 1
"""Of these rules. Part of each digest."""
HALVES = (0.5, 0.5, 0.5)
"""Mean and deviation of each color."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
NO_ROOM = "the limit of tokens has no room for an image"
FILTERS = range(6)
"""Pillow's numbers of filters."""
Tokens = tuple[int, ...]


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

    @property
    def patch_values(self) -> int:
        """Numbers of a patch in all frames."""
        return CHANNELS * self.temporal_patch_size * self.patch_size**2

    def count_patches(self, shape: ImageShape) -> int:
        """Of all tiles and the overview; pixels that make no whole patch are left out."""
        side, (rows, columns) = self.patch_size, shape.tiles
        height, width = shape.resized
        in_tile = (height // rows // side) * (width // columns // side)
        height, width = shape.overview or (0, 0)
        return rows * columns * in_tile + (height // side) * (width // side)


@attrs.frozen(kw_only=True)
class PatchLayout:
    """Fields and counts of all layouts."""

    patches: PatchRules
    encoder_layers: int
    piece_patches: int = 0
    """Patches of a layer in one piece of the encoder's work; 0: all of the layer."""
    image_token: int
    atomic: bool = False
    """Whether tokens of an image attend to later ones."""

    def num_tokens(self, shape: ImageShape) -> int:
        return sum(part if isinstance(part, int) else len(part) for part in self.runs(shape))

    def num_pieces(self, shape: ImageShape) -> int:
        patches = self.count_patches(shape)
        # One more for the patches before the first layer.
        return 1 + self.encoder_layers * -(-patches // (self.piece_patches or patches))

    def count_patches(self, shape: ImageShape) -> int:
        """In each layer of the encoder."""
        return self.patches.count_patches(shape)

    def span(self, start: int, shape: ImageShape, digest: bytes) -> MediaSpan:
        tokens, embedded = list[int](), list[tuple[int, int]]()
        for part in self.runs(shape):
            if isinstance(part, int):
                embedded.append((len(tokens), part))
                tokens += [self.image_token] * part
            else:
                tokens += part
        return MediaSpan(
            start=start,
            tokens=tuple(tokens),
            embedded=tuple(embedded),
            digest=digest,
            shape=shape,
            extent=self.extent(shape),
            atomic=self.atomic,
        )

    def runs(self, shape: ImageShape) -> Iterator[Tokens | int]:
        """Yield separators, and numbers of embedded tokens between them."""
        yield shape.view_tokens

    def extent(self, shape: ImageShape) -> int:
        return self.num_tokens(shape)


def fit_grid(size: ImageSize, tokens: int) -> tuple[int, int]:
    """Rows and columns of at most so many tokens, near the image's ratio."""
    if size.height > size.width:
        columns = max(1, math.floor(math.sqrt(tokens * size.width / size.height)))
        return tokens // columns, columns
    rows = max(1, math.floor(math.sqrt(tokens * size.height / size.width)))
    return rows, tokens // rows


def largest_shape(
    layout: PatchLayout, resize: Callable[[int], ImageShape], limit: int, tokens: int
) -> ImageShape:
    """The last of `resize(1)` to `resize(limit)` with at most so many tokens. Their number never
    falls. Raises `ValueError`."""
    bound = bisect_right(
        range(1, limit + 1), tokens, key=lambda bound: layout.num_tokens(resize(bound))
    )
    if not bound:
        raise ValueError(NO_ROOM)
    return resize(bound)


def name_layout(family: str, rules: PatchRules) -> str:
    """Other means or patches make other vectors of the same file."""
    parameters = sha256(repr(rules).encode()).hexdigest()
    return f"{family}-{VERSION}-{parameters[:16]}"


def bound_tokens(detail: Detail, max_tokens: int) -> int:
    """`high` has no right beyond the operator's bound, and `auto` is `high`."""
    return min(max_tokens, LOW_DETAIL_TOKENS) if detail == "low" else max_tokens


def read_rules(
    preprocessor: Mapping[str, Any],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    patch_size: int,
    merge_size: int,
    temporal_patch_size: int = 1,
) -> PatchRules:
    """Sizes of patches are those of config.json, for which the encoder's weights are made."""
    rescale = numbers_of(preprocessor, "rescale_factor", (1 / 255,), 1)[0]
    mean = numbers_of(preprocessor, "image_mean", mean, 3)
    std = numbers_of(preprocessor, "image_std", std, 3)
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


def count_of(parameters: Mapping[str, Any], key: str, default: int) -> int:
    """Raises `ValueError`."""
    value = parameters.get(key)
    if value is None:
        return default
    if isinstance(value, list) and value and value == value[:1] * len(value):
        value = value[0]  # InternVL's sides.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ValueError(f"{key} of the image encoder or processor is no positive integer")
    return value


def filter_of(preprocessor: Mapping[str, Any], default: int) -> int:
    """Pillow's number of the filter. Raises `ValueError`."""
    number = preprocessor.get("resample", default)
    if number not in FILTERS:
        raise ValueError("its image processor has a filter that Pillow does not know")
    return int(number)


def numbers_of(
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


def token_of(
    config: Mapping[str, Any], keys: tuple[str, ...], text: str, token_ids: Mapping[str, int]
) -> int:
    """The tokenizer's id, or that of the config. Raises `ValueError`."""
    ids = [token_ids.get(text), *(config.get(key) for key in keys)]
    for value in ids:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    raise ValueError(f"the tokenizer has no token {text}")
