"""InternVL's layout: tiles and an overview without names between them.

Rule: transformers/models/got_ocr2/image_processing_got_ocr2.py and internvl/processing_internvl.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from trouper.engine.vision.patch_rules import (
    NO_ROOM,
    Tokens,
    bound_tokens,
    count_of,
    filter_of,
    read_rules,
    token_of,
)
from trouper.engine.vision.tile_layouts import Tiles, closest_ratio, require_full_tokens
from trouper.protocol.media import BICUBIC, Detail, ImageShape, ImageSize
from trouper.storage.checkpoint_files import section

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@attrs.frozen(kw_only=True)
class InternLayout(Tiles):
    """An image is stretched to the grid of tiles whose ratio is its best."""

    min_tiles: int
    max_tiles: int
    start_token: int
    end_token: int

    def shape(self, size: ImageSize, detail: Detail, max_tokens: int) -> ImageShape:
        """A tile cannot be made smaller, so that the tokens around an image are not bounded.
        Raises `ValueError`."""
        single = ImageShape((self.tile, self.tile), self.tile_grid, resample=self.resample)
        tokens, in_view = bound_tokens(detail, max_tokens), single.view_tokens
        for maximum in range(self.max_tiles, 1, -1):
            columns, rows = closest_ratio(size, min(self.min_tiles, maximum), maximum, self.tile)
            if rows * columns == 1:
                break
            if (rows * columns + 1) * in_view <= tokens:
                return self._cut(rows, columns, (self.tile, self.tile))
        if in_view > tokens:
            raise ValueError(NO_ROOM)
        return single

    def runs(self, shape: ImageShape) -> Iterator[Tokens | int]:
        rows, columns = shape.tiles
        views = rows * columns + (shape.overview is not None)
        yield (self.start_token,)
        yield views * shape.view_tokens
        yield (self.end_token,)


def intern_layout(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any], token_ids: Mapping[str, int]
) -> InternLayout:
    """Tiles are counted by transformers' image processor, or else by config.json, which the
    publisher's code reads. Raises `ValueError`."""
    vision, size = section(config, "vision_config"), section(preprocessor, "size")
    tile = count_of(vision, "image_size", 448)
    ratio = config.get("downsample_ratio", 0.5)
    if ratio != 0.5 or config.get("ps_version", "v2") != "v2":
        raise ValueError("it joins patches in another way than 2 x 2 (downsample_ratio)")
    if not config.get("use_thumbnail", True):
        raise ValueError("its image processor makes no overview (use_thumbnail)")
    if any(count_of(size, side, tile) != tile for side in ("height", "width")):
        raise ValueError("size of the image processor is not that of the encoder")
    rules = read_rules(
        preprocessor,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        patch_size=count_of(vision, "patch_size", 14),
        merge_size=2,
    )
    require_full_tokens(tile, rules)
    splits = config.get("dynamic_image_size", True) is not False
    maximum = count_of(preprocessor, "max_patches", count_of(config, "max_dynamic_patch", 12))
    minimum = count_of(preprocessor, "min_patches", count_of(config, "min_dynamic_patch", 1))
    return InternLayout(
        patches=rules,
        encoder_layers=count_of(vision, "num_hidden_layers", 24),
        image_token=token_of(config, ("image_token_id",), "<IMG_CONTEXT>", token_ids),
        tile=tile,
        extra_patches=1,
        resample=filter_of(preprocessor, BICUBIC),
        marker="<IMG_CONTEXT>",
        min_tiles=minimum,
        max_tiles=maximum if splits else 1,
        start_token=token_of({}, (), "<img>", token_ids),
        end_token=token_of({}, (), "</img>", token_ids),
    )
