"""Attention of encoders, whose scores are bounded: 16,384 patches of one image have 17 GB of them
in float32."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.engine.platform import device
from trouper.engine.vision.tower import Rotation

FUSED_DIMS = (64, 80, 128)
"""Sizes of heads for which Metal has a fused kernel, without scores in memory."""
MAX_SCORE_BYTES = 2**26
ROPE_BASE = 10_000.0


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    patches: slice,
    *,
    scale: float | None = None,
) -> mx.array:
    """Attention of some patches to all: (groups, heads, n, dim) each. `scale`: of scores; None:
    dim ** -0.5. Waits for the device if it goes in parts."""
    queries = queries[:, :, patches]
    dim = queries.shape[-1]
    scale = dim**-0.5 if scale is None else scale
    size = _queries_at_once(queries, keys.shape[2])
    if not device.is_cpu():
        queries, keys, values = (_padded(part) for part in (queries, keys, values))
    attended = []
    for start in range(0, queries.shape[2], size):
        some = queries[:, :, start : start + size]
        attended.append(mx.fast.scaled_dot_product_attention(some, keys, values, scale=scale))
        if size < queries.shape[2]:
            mx.eval(attended[-1])  # Else a CPU has the scores of all parts in memory.
    return mx.concatenate(attended, axis=2)[..., :dim]


def _queries_at_once(queries: mx.array, patches: int) -> int:
    groups, heads, _, dim = queries.shape
    fused = not device.is_cpu() and queries.dtype != mx.float32 and dim <= FUSED_DIMS[-1]
    if fused:
        return patches
    return max(1, MAX_SCORE_BYTES // (4 * groups * heads * patches))


def _padded(part: mx.array) -> mx.array:
    dim = part.shape[-1]
    target = next((size for size in FUSED_DIMS if dim <= size), dim)
    return mx.pad(part, [(0, 0), (0, 0), (0, 0), (0, target - dim)]) if target > dim else part


def rotation_of(angles: Sequence[NDArray[np.floating]]) -> Rotation:
    """`angles`: (patches, frequencies) of the row and of the column."""
    both = np.concatenate(angles, axis=1)
    cosines, sines = np.cos(both).astype(np.float32), np.sin(both).astype(np.float32)
    return mx.array(cosines), mx.array(sines)


def axial_angles(
    axes: Sequence[NDArray[np.int64]], half_head: int, base: float = ROPE_BASE
) -> list[NDArray[np.floating]]:
    """Two of (patches, half_head / 2): half of the frequencies turn by the first of `axes`, the
    others by the second. `axes`: rows and columns of patches, of `grid_of`."""
    exponents = np.arange(0, half_head, 2, dtype=np.float32) / half_head
    frequencies = (1.0 / base**exponents).astype(np.float32)
    return [np.outer(axis, frequencies) for axis in axes]


def rotate(x: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    """Rotary embedding of (1, heads, n, dim), whose halves are pairs; `cosines` and `sines`: (n,
    dim / 2) float32."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(mx.float32), x[..., half:].astype(mx.float32)
    rotated = [first * cosines - second * sines, second * cosines + first * sines]
    return mx.concatenate(rotated, axis=-1).astype(x.dtype)


def rotate_pairs(x: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    """Rotary embedding of (1, heads, n, dim), whose neighbours are pairs; `cosines` and `sines`:
    (n, dim / 2) float32."""
    pairs = x.astype(mx.float32).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    rotated = [first * cosines - second * sines, second * cosines + first * sines]
    return mx.stack(rotated, axis=-1).reshape(x.shape).astype(x.dtype)
