"""Attention over the blocks of keys that an indexer scores best (MiniMax M3), for rows of different
lengths."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.adaptations.row_offsets import CurrentPass
from trouper.engine.passes.region import Region


# mlx-lm cuts blocks by distance from the last key; rows here begin at 0. Blocks without keys score
# minus infinity.
class BlockSparseAttention(nn.Module):
    """mlx-lm's attention with block masks of ours."""

    def __init__(self, attention: nn.Module, current: CurrentPass) -> None:
        super().__init__()
        self.attention = attention
        self.is_sparse_attn = True
        """Lets the model make an index cache."""
        self._current = current

    def __call__(
        self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None
    ) -> mx.array:
        region = self._current.region
        self.attention.is_sparse_attn = region is None
        if region is not None:
            keys = self._indexed(x, region, cache[1])
            mask = self._block_mask(x, keys, region, mask)
            # Nothing reads the index while all blocks are kept: computed with what is read, its
            # graph cannot grow.
            x = mx.depends(x, keys)
        out: mx.array = self.attention(x, mask, cache)
        return out

    def _indexed(self, x: mx.array, region: Region, cache: Any) -> mx.array:
        """(rows, 1, keys, dim): the index with the pass's tokens."""
        attention = self.attention
        keys = attention.index_k_norm(attention.index_k_proj(x)[:, :, None]).transpose(0, 2, 1, 3)
        keys = attention.index_rope(keys, offset=region.offset)
        indexed: mx.array = cache.update_and_fetch(keys, keys[..., :1])[0]
        return indexed

    def _block_mask(
        self, x: mx.array, keys: mx.array, region: Region, mask: mx.array | str | None
    ) -> mx.array | str | None:
        """(rows, heads, width, keys) bool, or `mask` if every block is kept."""
        attention, size, num_keys = self.attention, self.attention.index_block_size, keys.shape[2]
        blocks = -(-num_keys // size)
        if blocks <= attention.index_topk_blocks:
            return mask
        position = region.positions[:, None, :, None]
        visible = mx.arange(num_keys) <= position
        best = self._block_scores(x, keys, region, visible)
        distance = position // size - mx.arange(blocks)
        best = mx.where((distance >= 0) & (distance < attention.index_local_blocks), mx.inf, best)
        chosen = mx.argpartition(-best, kth=attention.index_topk_blocks - 1, axis=-1)[
            ..., : attention.index_topk_blocks
        ]
        kept = mx.put_along_axis(mx.zeros(best.shape, mx.bool_), chosen, mx.array(True), axis=-1)
        kept = mx.repeat(kept, size, axis=-1)[..., :num_keys] & visible
        return mx.repeat(kept, attention.num_attention_heads // attention.index_n_heads, axis=1)

    def _block_scores(
        self, x: mx.array, keys: mx.array, region: Region, visible: mx.array
    ) -> mx.array:
        """(rows, index heads, width, blocks): the best score of visible keys."""
        attention, (rows, width, _) = self.attention, x.shape
        queries = attention.index_q_proj(x).reshape(
            rows, width, attention.index_n_heads, attention.index_head_dim
        )
        queries = attention.index_rope(
            attention.index_q_norm(queries).transpose(0, 2, 1, 3), offset=region.offset
        )
        scores = queries.astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2)
        scores = mx.where(visible, scores, -mx.inf)
        end = -keys.shape[2] % attention.index_block_size
        scores = mx.pad(scores, [(0, 0), (0, 0), (0, 0), (0, end)], constant_values=-mx.inf)
        return scores.reshape(*scores.shape[:3], -1, attention.index_block_size).max(axis=-1)
