"""Layouts of families that cut large images into tiles, and add an overview: Idefics3 and SmolVLM,
LFM2-VL, Llama 4. A span has several runs of embedded tokens, with names of rows and columns.

Rules: transformers/models/{idefics3,lfm2_vl,llama4}/image_processing_*.py and processing_*.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import attrs
import numpy as np

from trouper.engine.vision.patch_rules import (
    HALVES,
    NO_ROOM,
    PatchLayout,
    PatchRules,
    Tokens,
    bound_tokens,
    count_of,
    filter_of,
    fit_grid,
    name_layout,
    read_rules,
    token_of,
)
from trouper.protocol.media import BILINEAR, LANCZOS, Detail, ImageShape, ImageSize
from trouper.storage.checkpoint_files import section

MAX_EDGE = 4096
"""Idefics3's largest side in pixels."""


@attrs.frozen(kw_only=True)
class Tiles(PatchLayout):
    """`tile`: side of a tile in pixels."""

    tile: int
    resample: int
    marker: str = "<image>"
    extra_patches: int = 0
    """Of each tile, which make no tokens."""

    @property
    def name(self) -> str:
        return name_layout(f"{type(self).__name__}-{self.resample}-{self.tile}", self.patches)

    @property
    def tile_grid(self) -> tuple[int, int, int]:
        side = self.tile // self.patches.token_size
        return 1, side, side

    def count_patches(self, shape: ImageShape) -> int:
        views = shape.tiles[0] * shape.tiles[1] + (shape.overview is not None)
        return super().count_patches(shape) + self.extra_patches * views

    def _overview_tokens(self, shape: ImageShape) -> int:
        assert shape.overview is not None
        height, width = (each // self.patches.token_size for each in shape.overview)
        return height * width

    def _cut(self, rows: int, columns: int, overview: tuple[int, int]) -> ImageShape:
        return ImageShape(
            (rows * self.tile, columns * self.tile),
            self.tile_grid,
            tiles=(rows, columns),
            overview=overview,
            resample=self.resample,
        )


# -- Idefics3, SmolVLM ---------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class IdeficsLayout(Tiles):
    """`longest_edge`: to which an image is enlarged before it is cut. `row_tokens`: names of the
    tiles of each row."""

    longest_edge: int
    splits: bool
    fake_token: int
    global_token: int
    row_tokens: tuple[Tokens, ...]
    newline: Tokens
    newlines: Tokens

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        tokens = bound_tokens(detail, max_tokens)
        if self.splits:
            for edge in range(self.longest_edge, self.tile, -self.tile):
                shape = self._split(size, edge)
                if self.num_tokens(shape) <= tokens:
                    return shape
        shape = ImageShape((self.tile, self.tile), self.tile_grid, resample=self.resample)
        if self.num_tokens(shape) > tokens:
            raise ValueError(NO_ROOM)
        return shape

    def _split(self, size: ImageSize, edge: int) -> ImageShape:
        """Enlarge or shrink the longer side to `edge`, then both to whole tiles. Roundings are
        those of transformers."""
        height, width = _longest_to(size.height, size.width, edge)
        ratio, tile = width / height, self.tile
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        return self._cut(height // tile, width // tile, (tile, tile))

    def runs(self, shape: ImageShape) -> Iterator[Tokens | int]:
        rows, columns = shape.tiles
        if shape.overview is not None:
            for row in range(rows):
                for column in range(columns):
                    yield self.fake_token, self.row_tokens[row][column]
                    yield shape.view_tokens
                yield self.newline if row < rows - 1 else self.newlines
        yield self.fake_token, self.global_token
        yield shape.view_tokens
        yield (self.fake_token,)


def _longest_to(height: int, width: int, edge: int) -> tuple[int, int]:
    """Height and width whose longer one is `edge` or `MAX_EDGE`, the other one even."""
    ratio = width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        height, width = edge, int(edge * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        width, height = MAX_EDGE, int(MAX_EDGE / ratio)
    elif height > width and height > MAX_EDGE:
        height, width = MAX_EDGE, int(MAX_EDGE * ratio)
    return max(height, 1), max(width, 1)


def idefics_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> IdeficsLayout:
    """Raises `ValueError`."""
    vision = section(config, "vision_config")
    patch = count_of(vision, "patch_size", 32)
    tile = count_of(vision, "image_size", 224)
    if count_of(section(preprocessor, "max_image_size"), "longest_edge", tile) != tile:
        raise ValueError("max_image_size of the image processor is not that of the encoder")
    edge = count_of(section(preprocessor, "size"), "longest_edge", 4 * tile)
    merge = count_of(config, "scale_factor", 2)
    rules = read_rules(preprocessor, mean=HALVES, std=HALVES, patch_size=patch, merge_size=merge)
    # The encoder's convolution leaves pixels out that make no whole patch.
    require_full_tokens(tile // patch * patch, rules)
    per_side = range(1, math.ceil(min(edge, MAX_EDGE) / tile) + 1)
    return IdeficsLayout(
        patches=rules,
        encoder_layers=count_of(vision, "num_hidden_layers", 12),
        image_token=token_of(config, ("image_token_id",), "<image>", token_ids),
        tile=tile,
        resample=filter_of(preprocessor, LANCZOS),
        longest_edge=edge,
        splits=preprocessor.get("do_image_splitting", True) is not False,
        fake_token=token_of({}, (), "<fake_token_around_image>", token_ids),
        global_token=token_of({}, (), "<global-img>", token_ids),
        row_tokens=tuple(
            tuple(token_of({}, (), f"<row_{row}_col_{column}>", token_ids) for column in per_side)
            for row in per_side
        ),
        newline=_newlines(1, token_ids),
        newlines=_newlines(2, token_ids),
    )


def _newlines(count: int, token_ids: Mapping[str, int]) -> Tokens:
    """Tokens of so many newlines before a special token, by the names of byte-level BPE."""
    together = token_ids.get("Ċ" * count)
    if together is not None:
        return (together,)
    return (token_of({}, (), "Ċ", token_ids),) * count


# -- LFM2-VL -------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class LfmLayout(Tiles):
    """Small images keep their ratio; large ones are cut into `min_tiles` to `max_tiles`."""

    min_tokens: int
    max_tokens: int
    """Bounds on the tokens of an image that is not cut, and of the overview."""
    min_tiles: int
    max_tiles: int
    tolerance: float
    """Times `max_tokens` from which an image is cut."""
    start_token: int
    end_token: int
    overview_token: int
    row_tokens: tuple[Tokens, ...]

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        tokens = bound_tokens(detail, max_tokens)
        if self._is_large(size):
            overview = self._resize(size, self.max_tokens)
            for maximum in range(self.max_tiles, self.min_tiles - 1, -1):
                columns, rows = closest_ratio(size, self.min_tiles, maximum, self.tile)
                shape = self._cut(rows, columns, overview)
                if self.num_tokens(shape) <= tokens:
                    return shape
        room, side = tokens - 2, self.patches.token_size  # The start's and the end's tokens.
        if room < 1:
            raise ValueError(NO_ROOM)
        height, width = self._resize(size, min(self.max_tokens, room))
        rows, columns = height // side, width // side
        if rows * columns > room:
            rows, columns = fit_grid(size, room)
        return ImageShape((rows * side, columns * side), (1, rows, columns), resample=self.resample)

    def _is_large(self, size: ImageSize) -> bool:
        if self.max_tiles < 2:
            return False
        patch, side = self.patches.patch_size, self.patches.token_size
        height, width = (
            max(patch, round(each / side) * side) for each in (size.height, size.width)
        )
        return height * width > self.max_tokens * side**2 * self.tolerance

    def _resize(self, size: ImageSize, max_tokens: int) -> tuple[int, int]:
        """Height and width in pixels, multiples of a token's side."""
        side, pixels = self.patches.token_size, size.height * size.width
        height, width = (max(side, round(each / side) * side) for each in (size.height, size.width))
        if height * width > max_tokens * side**2:
            scale = math.sqrt(pixels / (max_tokens * side**2))
            height, width = (
                max(side, math.floor(each / scale / side) * side)
                for each in (size.height, size.width)
            )
        elif height * width < self.min_tokens * side**2:
            scale = math.sqrt(self.min_tokens * side**2 / pixels)
            height, width = (
                math.ceil(each * scale / side) * side for each in (size.height, size.width)
            )
        return height, width

    def runs(self, shape: ImageShape) -> Iterator[Tokens | int]:
        rows, columns = shape.tiles
        yield (self.start_token,)
        if shape.overview is None:
            yield shape.view_tokens
        else:
            for row in range(rows):
                for column in range(columns):
                    yield (self.row_tokens[row][column],)
                    yield shape.view_tokens
            yield (self.overview_token,)
            yield self._overview_tokens(shape)
        yield (self.end_token,)


@cache
def _grids(minimum: int, maximum: int) -> tuple[tuple[int, int], ...]:
    pairs = [
        (columns, rows)
        for count in range(minimum, maximum + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if minimum <= columns * rows <= maximum
    ]
    # As transformers orders them, a set's order included: it decides between equal distances.
    return tuple(sorted(set(pairs), key=lambda pair: pair[0] * pair[1]))


def closest_ratio(size: ImageSize, minimum: int, maximum: int, tile: int) -> tuple[int, int]:
    """(columns, rows) of tiles whose ratio is the image's best. Of equal ones the larger, if the
    image has half its pixels."""
    ratio, best, distance = size.width / size.height, (1, 1), math.inf
    for columns, rows in _grids(minimum, maximum):
        gap = abs(ratio - columns / rows)
        large = size.width * size.height > 0.5 * tile**2 * columns * rows
        if gap < distance or (gap == distance and large):
            best, distance = (columns, rows), gap
    return best


def lfm_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> LfmLayout:
    """Raises `ValueError`."""
    if not preprocessor.get("use_thumbnail", True):
        raise ValueError("its image processor makes no overview (use_thumbnail)")
    vision, tile = section(config, "vision_config"), count_of(preprocessor, "tile_size", 512)
    rules = read_rules(
        preprocessor,
        mean=HALVES,
        std=HALVES,
        patch_size=count_of(vision, "patch_size", 16),
        merge_size=count_of(config, "downsample_factor", 2),
    )
    require_full_tokens(tile, rules)
    splits = preprocessor.get("do_image_splitting", True) is not False
    maximum = count_of(preprocessor, "max_tiles", 10) if splits else 1
    names = range(1, maximum + 1)
    return LfmLayout(
        patches=rules,
        encoder_layers=count_of(vision, "num_hidden_layers", 12),
        image_token=token_of(config, ("image_token_id",), "<image>", token_ids),
        tile=tile,
        resample=filter_of(preprocessor, BILINEAR),
        min_tokens=count_of(preprocessor, "min_image_tokens", 64),
        max_tokens=count_of(preprocessor, "max_image_tokens", 256),
        min_tiles=count_of(preprocessor, "min_tiles", 2) if splits else 1,
        max_tiles=maximum,
        tolerance=float(preprocessor.get("max_pixels_tolerance", 2.0)),
        start_token=token_of({}, (), "<|image_start|>", token_ids),
        end_token=token_of({}, (), "<|image_end|>", token_ids),
        overview_token=token_of({}, (), "<|img_thumbnail|>", token_ids),
        row_tokens=tuple(
            tuple(
                token_of({}, (), f"<|img_row_{row}_col_{column}|>", token_ids)
                for column in range(1, maximum // row + 1)
            )
            for row in names
        ),
    )


# -- Llama 4 -------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class LlamaLayout(Tiles):
    """An image keeps its ratio in a canvas of at most `max_tiles` tiles; black fills the rest."""

    max_tiles: int
    start_token: int
    end_token: int
    overview_token: int
    column_token: int
    row_token: int
    """Behind each tile but a row's last one, and behind each row."""

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        tokens = bound_tokens(detail, max_tokens)
        for maximum in range(self.max_tiles, 0, -1):
            shape = self._fit(size, maximum)
            if self.num_tokens(shape) <= tokens:
                return shape
        raise ValueError(NO_ROOM)

    def _fit(self, size: ImageSize, maximum: int) -> ImageShape:
        rows, columns = best_canvas(size, maximum, self.tile)
        tile, resized = self.tile, (rows * self.tile, columns * self.tile)
        # Small images are not enlarged beyond one tile.
        height = min(max(size.height, tile), resized[0])
        width = min(max(size.width, tile), resized[1])
        down, along = height / size.height, width / size.width
        if along < down:
            height = min(math.floor(size.height * along), height)
        else:
            width = min(math.floor(size.width * down), width)
        scaled = max(height, 1), max(width, 1)
        return ImageShape(
            resized,
            self.tile_grid,
            tiles=(rows, columns),
            scaled=None if scaled == resized else scaled,
            overview=(tile, tile) if rows * columns > 1 else None,
            resample=self.resample,
        )

    def runs(self, shape: ImageShape) -> Iterator[Tokens | int]:
        rows, columns = shape.tiles
        yield (self.start_token,)
        if shape.overview is not None:
            for _ in range(rows):
                for column in range(columns):
                    yield shape.view_tokens
                    if column < columns - 1:
                        yield (self.column_token,)
                yield (self.row_token,)
        yield (self.overview_token,)
        yield shape.view_tokens
        yield (self.end_token,)


def best_canvas(size: ImageSize, maximum: int, tile: int) -> tuple[int, int]:
    """(rows, columns) of the canvas that enlarges the image least, or else shrinks it least; of
    such canvases the smallest."""
    # In float32, as transformers: canvases whose scales round to one number are equal.
    scales = {
        (rows, columns): min(
            np.float32(rows * tile) / np.float32(size.height),
            np.float32(columns * tile) / np.float32(size.width),
        )
        for rows, columns in _canvases(maximum)
    }
    enlarging = [scale for scale in scales.values() if scale >= 1]
    chosen = min(enlarging) if enlarging else max(scales.values())
    fitting = [canvas for canvas, scale in scales.items() if scale == chosen]
    return min(fitting, key=lambda canvas: canvas[0] * canvas[1])


@cache
def _canvases(maximum: int) -> tuple[tuple[int, int], ...]:
    """In the order of transformers, by which the first of equal ones is chosen."""
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for count in range(maximum, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                columns = count // rows
                by_ratio.setdefault(rows / columns, []).append((rows, columns))
    return tuple(canvas for canvases in by_ratio.values() for canvas in canvases)


def llama_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> LlamaLayout:
    """Raises `ValueError`."""
    if preprocessor.get("resize_to_max_canvas"):
        raise ValueError("its image processor enlarges images (resize_to_max_canvas)")
    vision = section(config, "vision_config")
    tile = count_of(vision, "image_size", 448)
    ratio = vision.get("pixel_shuffle_ratio", 0.5)
    rules = read_rules(
        preprocessor,
        mean=HALVES,
        std=HALVES,
        patch_size=count_of(vision, "patch_size", 14),
        merge_size=round(1 / ratio),
    )
    require_full_tokens(tile, rules)
    return LlamaLayout(
        patches=rules,
        encoder_layers=count_of(vision, "num_hidden_layers", 34),
        image_token=token_of(config, ("image_token_index",), "<|patch|>", token_ids),
        tile=tile,
        extra_patches=1,
        resample=filter_of(preprocessor, BILINEAR),
        marker="<|image|>",
        max_tiles=count_of(preprocessor, "max_patches", 16),
        start_token=token_of(config, ("boi_token_index",), "<|image_start|>", token_ids),
        end_token=token_of(config, ("eoi_token_index",), "<|image_end|>", token_ids),
        overview_token=token_of({}, (), "<|image|>", token_ids),
        column_token=token_of({}, (), "<|tile_x_separator|>", token_ids),
        row_token=token_of({}, (), "<|tile_y_separator|>", token_ids),
    )


# -- parameters of all ---------------------------------------------------------------------------

TileLayout = IdeficsLayout | LfmLayout | LlamaLayout


def require_full_tokens(tile: int, rules: PatchRules) -> None:
    """Raises `ValueError`."""
    if tile % rules.token_size or not tile:
        raise ValueError(
            f"a tile of {tile} pixels is not made of whole tokens of {rules.token_size} pixels"
        )
