"""A learned grid of positions, resampled to an image's grid as PyTorch's `interpolate` does
(`align_corners=False`)."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.engine.vision.patch_rules import PatchRules
from trouper.engine.vision.patches import grid_of
from trouper.protocol.media import Pixels

Weights = NDArray[np.float32]
SHARPNESS = -0.75
"""Keys' parameter of the cubic."""


def resample(grid: mx.array, down: Weights, along: Weights) -> mx.array:
    """(height, width, dim) to (rows, columns, dim). `down`: (rows, height); `along`: (columns,
    width)."""
    rows = mx.tensordot(mx.array(down), grid.astype(mx.float32), axes=1)
    return mx.tensordot(rows, mx.array(along), axes=[[1], [1]]).transpose(0, 2, 1)


def positions_of(
    table: mx.array, weights: Callable[[int, int], Weights], pixels: Pixels, rules: PatchRules
) -> mx.array:
    """(patches, dim): a square table (side, side, dim), resampled to the image's patches."""
    height, width = (each // rules.patch_size for each in (pixels.height, pixels.width))
    side = table.shape[0]
    resampled = resample(table, weights(height, side), weights(width, side))
    rows, columns = grid_of(pixels, rules)
    return resampled.reshape(height * width, -1)[mx.array(rows * width + columns)]


def cubic_weights(size: int, side: int) -> Weights:
    """(size, side): shares of `side` places in each of `size` places, by the bicubic filter."""
    centers = (np.arange(size, dtype=np.float32) + 0.5) * np.float32(side / size) - 0.5
    floors, weights = np.floor(centers).astype(int), np.zeros((size, side), np.float32)
    for offset in range(-1, 3):
        distance = np.abs(centers - floors - offset)
        near = ((SHARPNESS + 2) * distance - (SHARPNESS + 3)) * distance**2 + 1
        far = ((distance - 5) * distance + 8) * distance * SHARPNESS - 4 * SHARPNESS
        shares = np.where(distance <= 1, near, far)
        # The edge stands for places beyond it.
        places = np.clip(floors + offset, 0, side - 1)
        np.add.at(weights, (np.arange(size), places), shares)
    return weights


def linear_weights(size: int, side: int) -> Weights:
    """As `cubic_weights`, by the bilinear filter, which grows where places become fewer
    (`antialias=True`)."""
    scale = side / size
    width = max(scale, 1.0)
    centers = (np.arange(size) + 0.5) * scale
    distances = np.abs(np.arange(side) + 0.5 - centers[:, None]) / width
    weights = np.maximum(0, 1 - distances)
    shares: Weights = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return shares
