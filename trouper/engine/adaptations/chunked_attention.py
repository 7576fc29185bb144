"""Attention within chunks (Llama 4) of rows of different lengths.

Masks and scales follow each row's positions; caches keep all tokens.
"""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from trouper.engine.adaptations.row_offsets import CurrentPass
from trouper.engine.passes.region import Region


def drops_chunks(cache: object) -> bool:
    """Whether mlx-lm's model lets this cache drop tokens behind a chunk; slots keep all."""
    return hasattr(cache, "maybe_trim_front")


@attrs.frozen
class RowOffsets:
    """A layer's cache with each row's offset."""

    cache: Any
    offset: mx.array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        fetched: tuple[mx.array, mx.array] = self.cache.update_and_fetch(keys, values)
        return fetched


class TemperedProjection(nn.Module):
    """Query projection scaled by position."""

    def __init__(self, projection: nn.Module, floor_scale: float, attn_scale: float) -> None:
        super().__init__()
        self.projection = projection
        self._floor_scale, self._attn_scale = floor_scale, attn_scale
        self._positions = mx.zeros((1, 1), mx.int32)

    def set_positions(self, positions: mx.array) -> None:
        """Of the next tokens, (rows or 1, width)."""
        self._positions = positions

    def __call__(self, x: mx.array) -> mx.array:
        queries: mx.array = self.projection(x)
        steps = mx.floor((self._positions + 1) / self._floor_scale)
        scales = mx.log(steps + 1.0) * self._attn_scale + 1.0
        return (queries * scales[..., None]).astype(queries.dtype)


class ChunkedAttention(nn.Module):
    """Llama 4's attention with masks and scales per row."""

    def __init__(self, attention: nn.Module, chunk: int, current: CurrentPass) -> None:
        super().__init__()
        self.attention = attention
        self._chunk, self._current = chunk, current
        if attention.attn_temperature_tuning and not attention.use_rope:
            attention.attn_temperature_tuning = 0
            attention.q_proj = TemperedProjection(
                attention.q_proj, attention.floor_scale, attention.attn_scale
            )

    @property
    def _tempered(self) -> TemperedProjection | None:
        """No attribute: the model would have the projection twice."""
        projection = self.attention.q_proj
        return projection if isinstance(projection, TemperedProjection) else None

    def __call__(
        self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None
    ) -> mx.array:
        region = self._current.region
        if (tempered := self._tempered) is not None:
            tempered.set_positions(self._positions(region, cache, x.shape[1]))
        if region is not None:
            mask = _chunk_mask(region, self._chunk) if drops_chunks(cache) else mask
            cache = RowOffsets(cache, region.offset)
        out: mx.array = self.attention(x, mask, cache)
        return out

    def _positions(self, region: Region | None, cache: Any, width: int) -> mx.array:
        if region is not None:
            return region.positions
        offset = 0 if cache is None else cache.offset
        return mx.arange(offset, offset + width)[None]


def _chunk_mask(region: Region, chunk: int) -> mx.array:
    """(rows, 1, width, keys) bool: keys of the query's chunk, up to the query."""
    query, key = region.positions[:, :, None], mx.arange(region.keys, dtype=mx.int32)
    return ((key <= query) & (key // chunk == query // chunk))[:, None]
