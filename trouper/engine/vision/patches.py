"""Pixels become normalised patches, as transformers' image processors make them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trouper.engine.vision.layouts import PatchRules
from trouper.protocol.media import Pixels

Patches = NDArray[np.float32]
CHANNELS = 3


def patches_of(pixels: Pixels, rules: PatchRules) -> Patches:
    """(patches, 3 * size * size) float32, channel first. The patches of one token come one after
    another: in the order of its rows, then of its columns."""
    image = _normalised(pixels, rules)
    size, merge = rules.patch_size, rules.merge_size
    rows, columns = pixels.height // (size * merge), pixels.width // (size * merge)
    squares = image.reshape((rows, merge, size, columns, merge, size, CHANNELS))
    ordered = squares.transpose((0, 3, 1, 4, 6, 2, 5))
    return np.ascontiguousarray(ordered).reshape(-1, CHANNELS * size * size)


def grid_of(pixels: Pixels, rules: PatchRules) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(patches,) each: row and column of each patch, in the order of `patches_of`."""
    size, merge = rules.patch_size, rules.merge_size
    height, width = pixels.height // size, pixels.width // size
    grid = np.indices((height, width))
    squares = grid.reshape((2, height // merge, merge, width // merge, merge))
    rows, columns = squares.transpose((0, 1, 3, 2, 4)).reshape(2, -1)
    return rows, columns


def _normalised(pixels: Pixels, rules: PatchRules) -> Patches:
    """(height, width, 3). One product and one sum a value: 64 megapixels take 800 MB."""
    values = np.frombuffer(pixels.rgb, np.uint8).reshape(pixels.height, pixels.width, CHANNELS)
    normalised = values.astype(np.float32)
    normalised *= (rules.rescale / np.array(rules.std)).astype(np.float32)
    normalised -= (np.array(rules.mean) / np.array(rules.std)).astype(np.float32)
    return normalised
