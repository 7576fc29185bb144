"""Rotary embeddings and tables of positions for rows of different offsets."""

from __future__ import annotations

import attrs
import mlx.core as mx
import mlx.nn as nn

from trouper.engine.passes.region import Region


@attrs.define
class CurrentPass:
    """The region of the pass being built; None outside."""

    region: Region | None = None


class RowRope(nn.Module):
    """A rotary embedding that follows the rows of the current pass."""

    def __init__(self, rope: nn.Module, current: CurrentPass) -> None:
        super().__init__()
        self.rope = rope
        self._current = current


class RowByRowRope(RowRope):
    """mlx-lm's `DynamicNTKScalingRoPE`: beyond the limit row by row."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        region = self._current.region
        if region is None:
            return self.rope(x, offset=offset)
        if region.longest <= self.rope.max_position_embeddings:
            return mx.fast.rope(
                x,
                self.rope.dims,
                traditional=self.rope.traditional,
                base=self.rope.base,
                scale=1.0,
                offset=offset,
            )
        spans = zip(region.lengths.tolist(), region.counts.tolist(), strict=True)
        return mx.concatenate(
            [self._row(x[row : row + 1], *span, region) for row, span in enumerate(spans)]
        )

    def _row(self, x: mx.array, length: int, count: int, region: Region) -> mx.array:
        """(1, heads, width, dim): the row's tokens at once, drafts one by one; padding stays."""
        size = 1 if region.singly else max(count, 1)
        parts = [
            self.rope(x[:, :, at : at + size], offset=length + at) for at in range(0, count, size)
        ]
        return mx.concatenate([*parts, x[:, :, count:]], axis=2)


class RowOffsetRope(RowRope):
    """A rotary embedding at each row's offset."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        region = self._current.region
        rotated: mx.array = self.rope(x, offset=offset if region is None else region.offset)
        return rotated


class RowPositions(nn.Module):
    """Learned positions of each row. Padding may exceed the table."""

    def __init__(self, table: nn.Module, current: CurrentPass) -> None:
        super().__init__()
        self.table = table
        self._current = current

    def __call__(self, positions: mx.array) -> mx.array:
        region = self._current.region
        if region is not None:
            positions = mx.minimum(region.positions, self.table.weight.shape[0] - 1)
        found: mx.array = self.table(positions)
        return found


@attrs.frozen
class Traits:
    """Traits of a model's caches, mostly `USUAL` (see `adaptation_registry.py`)."""

    mask_rank: int = 4
    """Axes of a mask that differs between rows."""
    open_buffers: bool = False
    """The model assigns caches' `keys` and `values`."""
    counts_from_zero: bool = False
    """Caches give offset 0; an adaptation corrects positions."""


USUAL = Traits()
