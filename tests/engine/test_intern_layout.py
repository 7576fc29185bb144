"""InternVL's layout against transformers' own functions, its bounds, and checkpoints of its
publisher."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.layout_references import KEPT, sizes
from tests.long_tests import PLAYED
from trouper.engine.vision.intern_layout import IMAGENET_MEAN, InternLayout
from trouper.engine.vision.layouts import layout_of
from trouper.protocol.media import BICUBIC, ImageShape, ImageSize

TOKEN_IDS = {"<IMG_CONTEXT>": 1, "<img>": 2, "</img>": 3}
CONFIG: dict[str, Any] = {
    "model_type": "internvl",
    "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]},
}


def layout(changes: dict[str, Any], processor: dict[str, Any] | None = None) -> InternLayout:
    made = layout_of(CONFIG | changes, processor or {}, TOKEN_IDS)
    assert isinstance(made, InternLayout)
    return made


def shape_of(made: InternLayout, height: int, width: int, limit: int = 10**9) -> ImageShape:
    return made.shape(ImageSize(width, height, "png"), "auto", limit)


@pytest.mark.parametrize("bounds", [(1, 12), (1, 6), (3, 9)])
def test_tiles_and_tokens_are_those_of_transformers(bounds: tuple[int, int]) -> None:
    images = importlib.import_module("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    processing = importlib.import_module("transformers.models.internvl.processing_internvl")
    text = SimpleNamespace(
        start_image_token="s", image_token="i", end_image_token="e", image_seq_length=256
    )
    made = layout({}, {"min_patches": bounds[0], "max_patches": bounds[1]})
    for height, width in list(sizes())[: None if PLAYED else KEPT]:
        columns, rows = images.get_optimal_tiled_canvas((height, width), (448, 448), *bounds)
        shape = shape_of(made, height, width)
        assert shape.tiles == (rows, columns), (height, width)
        assert shape.resized == (448 * rows, 448 * columns)
        assert shape.overview == ((448, 448) if rows * columns > 1 else None)
        views = rows * columns + (rows * columns > 1)
        written = processing.InternVLProcessor.replace_image_token(
            text, {"num_patches": [views]}, 0
        )
        assert made.num_tokens(shape) == len(written)
        assert made.count_patches(shape) == views * (32 * 32 + 1)


def test_the_span_has_marks_and_one_run() -> None:
    made = layout({})
    span = made.span(7, shape_of(made, 448, 896), b"d")
    assert span.tokens == (2, *(1,) * 768, 3)
    assert (span.embedded, span.extent, span.atomic) == (((1, 768),), 770, False)
    assert span.shape.resample == BICUBIC
    assert made.patches.mean == IMAGENET_MEAN


def test_a_limit_makes_fewer_tiles_and_one_at_least() -> None:
    made = layout({})
    counts = {limit: shape_of(made, 3000, 4000, limit).tiles for limit in (4096, 2000, 1700, 256)}
    assert counts == {4096: (3, 4), 2000: (2, 3), 1700: (2, 2), 256: (1, 1)}
    assert made.shape(ImageSize(4000, 3000, "png"), "low", 4096).tiles == (1, 1)
    with pytest.raises(ValueError, match="no room"):
        shape_of(made, 10, 10, 255)


def test_checkpoints_of_the_publisher_name_tiles_in_their_config() -> None:
    made = layout({"model_type": "internvl_chat", "max_dynamic_patch": 6}, {"size": 448})
    assert shape_of(made, 3000, 4000).tiles == (2, 3)
    uncut = layout({"model_type": "internvl_chat", "dynamic_image_size": False})
    assert shape_of(uncut, 3000, 4000).tiles == (1, 1)


@pytest.mark.parametrize(
    ("changes", "processor", "reason"),
    [
        ({"downsample_ratio": 0.25}, {}, "another way than 2 x 2"),
        ({"ps_version": "v1"}, {}, "another way than 2 x 2"),
        ({"use_thumbnail": False}, {}, "no overview"),
        ({}, {"size": {"height": 384, "width": 384}}, "is not that of the encoder"),
        ({"vision_config": {"image_size": [448, 224]}}, {}, "no positive integer"),
        ({"vision_config": {"image_size": 450}}, {}, "not made of whole tokens"),
    ],
)
def test_a_checkpoint_that_differs_says_why(
    changes: dict[str, Any], processor: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        layout(changes, processor)
