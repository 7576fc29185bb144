"""Patches are those of transformers' processors over Pillow, and positions those of mlx-vlm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.engine.vision.families import (
    PREPROCESSOR,
    QWEN_SIZE,
    Models,
    picture,
    text,
)
from trouper.engine.kv.row_images import positions_of
from trouper.engine.vision.patch_rules import PatchRules
from trouper.engine.vision.patches import grid_of, patches_of
from trouper.protocol.media import Pixels

MEAN, DEVIATION = PREPROCESSOR["image_mean"], PREPROCESSOR["image_std"]
SIZES = [(16, 24), (8, 8), (64, 40)]


def rules(merge: int, frames: int = 1) -> PatchRules:
    return PatchRules(tuple(MEAN), tuple(DEVIATION), 1 / 255, 4, merge, frames)


def array_of(pixels: Pixels) -> NDArray[np.uint8]:
    return np.frombuffer(pixels.rgb, np.uint8).reshape(pixels.height, pixels.width, 3)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_qwen_patches(height: int, width: int) -> None:
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, image_mean=MEAN, image_std=DEVIATION, size=QWEN_SIZE, do_resize=False
    )
    pixels = picture(height, width, 3)
    expected = processor(images=[array_of(pixels)], return_tensors="np")["pixel_values"]
    patches = np.array(patches_of(pixels, rules(2, 2)))
    framed = patches.reshape(len(patches), 3, 1, -1).repeat(2, axis=2)
    framed = framed.reshape(len(patches), -1)
    np.testing.assert_allclose(framed, expected, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pixtral_patches(height: int, width: int) -> None:
    processor = PixtralImageProcessorPil(
        patch_size=4, image_mean=MEAN, image_std=DEVIATION, do_resize=False
    )
    pixels = picture(height, width, 4)
    batch: Any = processor(images=[array_of(pixels)], return_tensors="np")
    image = np.array(batch["pixel_values"]).reshape(3, height, width)
    rows, columns = grid_of(pixels, rules(1))
    for patch, row, column in zip(
        np.array(patches_of(pixels, rules(1))), rows, columns, strict=True
    ):
        expected = image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        np.testing.assert_allclose(patch, expected.ravel(), atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_positions(vision_model: Models, seed: int) -> None:
    random = np.random.RandomState(seed)
    model = vision_model("qwen3_vl")
    mixed: list[list[int] | Pixels] = []
    for index in range(random.randint(1, 5)):
        mixed.append(text(random.randint(1, 9), seed + index))
        mixed.append(picture(8 * random.randint(1, 7), 8 * random.randint(1, 7), index))
    tokens, spans, images = model.prompt([*mixed, text(5, seed)])
    grid = [[1, image.height // 4, image.width // 4] for image in images]
    assert model.reference is not None
    language: Any = model.reference.language_model
    expected, delta = language.get_rope_index(mx.array([tokens]), mx.array(grid))
    positions = positions_of(spans, 0, len(tokens))
    assert np.array_equal(positions, np.array(expected)[:, 0])
    assert sum(span.extent - len(span.tokens) for span in spans) == int(delta.item())
    start, stop = sorted(random.randint(0, len(tokens) + 1, 2).tolist())
    assert np.array_equal(positions_of(spans, start, stop), positions[:, start:stop])
