"""Pixels become normalised patches, as transformers' image processors make them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.engine.vision.patch_rules import PatchRules
from trouper.protocol.media import CHANNELS, Pixels


def patches_of(pixels: Pixels, rules: PatchRules) -> mx.array:
    """(patches, 3 * size * size) float32, channel first, lazy. The patches of one token come one
    after another: in the order of its rows, then of its columns."""
    # On the device: a host takes as long for this as a GPU for the encoder.
    image = _normalised(pixels, rules)
    size, merge = rules.patch_size, rules.merge_size
    rows, columns = pixels.height // (size * merge), pixels.width // (size * merge)
    squares = image.reshape((rows, merge, size, columns, merge, size, CHANNELS))
    ordered = squares.transpose((0, 3, 1, 4, 6, 2, 5))
    return ordered.reshape(-1, CHANNELS * size * size)


def framed_patches_of(pixels: Pixels, rules: PatchRules) -> mx.array:
    """(patches, 3 * frames * size * size) float32: as `patches_of`, of an image that is as many
    equal frames."""
    patches = patches_of(pixels, rules)
    framed = patches.reshape(len(patches), CHANNELS, 1, -1)
    return mx.repeat(framed, rules.temporal_patch_size, axis=2).reshape(len(patches), -1)


def grid_of(pixels: Pixels, rules: PatchRules) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(patches,) each: row and column of each patch, in the order of `patches_of`."""
    size, merge = rules.patch_size, rules.merge_size
    height, width = pixels.height // size, pixels.width // size
    grid = np.indices((height, width))
    squares = grid.reshape((2, height // merge, merge, width // merge, merge))
    rows, columns = squares.transpose((0, 1, 3, 2, 4)).reshape(2, -1)
    return rows, columns


def channel_last(pixels: Pixels, rules: PatchRules) -> mx.array:
    """(patches, size * size * 3) float32, in the order of `patches_of`."""
    patches = patches_of(pixels, rules)
    return patches.reshape(len(patches), CHANNELS, -1).swapaxes(1, 2).reshape(patches.shape)


def views_of(pixels: Pixels, tile: int, rules: PatchRules) -> list[Pixels]:
    """Tiles row by row, then the overview; the image itself if it has none. Pixels that make no
    whole patch are left out, at the right and below."""
    if pixels.overview is None:
        return [_cropped(_array_of(pixels), rules)]
    image = _array_of(pixels)
    views = [
        image[top : top + tile, left : left + tile]
        for top in range(0, pixels.height, tile)
        for left in range(0, pixels.width, tile)
    ]
    return [_cropped(view, rules) for view in (*views, _array_of(pixels.overview))]


def _cropped(image: NDArray[np.uint8], rules: PatchRules) -> Pixels:
    height, width = (side // rules.token_size * rules.token_size for side in image.shape[:2])
    return Pixels(height, width, image[:height, :width].tobytes())


def _array_of(pixels: Pixels) -> NDArray[np.uint8]:
    values = np.frombuffer(pixels.rgb, np.uint8)
    return values.reshape(pixels.height, pixels.width, CHANNELS)


def _normalised(pixels: Pixels, rules: PatchRules) -> mx.array:
    """(height, width, 3) float32."""
    values = _array_of(pixels)
    scales = (rules.rescale / np.array(rules.std)).astype(np.float32)
    shifts = (np.array(rules.mean) / np.array(rules.std)).astype(np.float32)
    return mx.array(values).astype(mx.float32) * mx.array(scales) - mx.array(shifts)
