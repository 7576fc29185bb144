"""Attention within chunks of a row, as Llama 4 has it, with rows of different lengths in one pass.

mlx-lm makes the masks of chunks and the scales of long contexts from one offset. Here each row's
positions make both; the caches keep all tokens of a row, and report that they begin at 0.
"""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from trouper.engine.adaptations.row_offsets import CurrentPass
from trouper.engine.kv.full_slots import FullSlots
from trouper.engine.kv.region import Region


class ChunkSlots(FullSlots):
    """Counterpart of mlx-lm's ChunkedKVCache. That one drops tokens that no chunk reaches; this one
    keeps all tokens."""

    start_position = 0

    def maybe_trim_front(self) -> None:
        """Do nothing: all tokens are kept."""


@attrs.frozen
class RowOffsets:
    """Wrapper of a cache that gives attention an offset for each row."""

    cache: FullSlots

    @property
    def offset(self) -> mx.array:
        return self.cache.region.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.cache.update_and_fetch(keys, values)


class TemperedProjection(nn.Module):
    """Query projection that scales queries by their position in the row."""

    def __init__(self, projection: nn.Module, floor_scale: float, attn_scale: float) -> None:
        super().__init__()
        self.projection = projection
        self._floor_scale, self._attn_scale = floor_scale, attn_scale
        self._positions = mx.zeros((1, 1), mx.int32)

    def set_positions(self, positions: mx.array) -> None:
        """Set the positions of the next tokens, (rows or 1, width)."""
        self._positions = positions

    def __call__(self, x: mx.array) -> mx.array:
        queries: mx.array = self.projection(x)
        steps = mx.floor((self._positions + 1) / self._floor_scale)
        scales = mx.log(steps + 1.0) * self._attn_scale + 1.0
        return (queries * scales[..., None]).astype(queries.dtype)


class ChunkedAttention(nn.Module):
    """Llama 4's attention with a mask and scales for each row; outside of our passes with the
    caller's."""

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
        """The projection of a layer that scales its queries. No attribute of its own: the model
        would have it twice."""
        projection = self.attention.q_proj
        return projection if isinstance(projection, TemperedProjection) else None

    def __call__(
        self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None
    ) -> mx.array:
        region = self._current.region
        if (tempered := self._tempered) is not None:
            tempered.set_positions(self._positions(region, cache, x.shape[1]))
        if region is not None:
            mask = _chunk_mask(region, self._chunk) if isinstance(cache, ChunkSlots) else mask
            cache = RowOffsets(cache)
        out: mx.array = self.attention(x, mask, cache)
        return out

    def _positions(self, region: Region | None, cache: Any, width: int) -> mx.array:
        if region is not None:
            return region.positions
        offset = 0 if cache is None else cache.offset
        return mx.arange(offset, offset + width)[None]


def _chunk_mask(region: Region, chunk: int) -> mx.array:
    """(rows, 1, width, keys) bool: keys of the query's own chunk, up to itself."""
    query, key = region.positions[:, :, None], mx.arange(region.keys, dtype=mx.int32)
    return ((key <= query) & (key // chunk == query // chunk))[:, None]
