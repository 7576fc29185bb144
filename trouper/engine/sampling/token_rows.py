"""Tokens of rows on the device, for a step before the last one's tokens are read."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TypeVar

import attrs
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.engine.passes.region import Ints
from trouper.engine.spec_decode.verification_spans import indices

R = TypeVar("R")
S = TypeVar("S")
ABSENT = -1
GROWTH = 256
"""Number of tokens by which the arrays grow."""


@attrs.define(eq=False)
class RowTokens:
    """Prompt and output of one row: `tokens` (W,) int32, ABSENT from `length` on."""

    tokens: mx.array
    length: int

    @classmethod
    def of(cls, tokens: Ints) -> RowTokens:
        padded = np.full(capacity(len(tokens)), ABSENT, np.int32)
        padded[: len(tokens)] = tokens
        return cls(mx.array(padded), len(tokens))


def with_state(rows: Sequence[R], states: Sequence[S | None]) -> list[tuple[int, R, S]]:
    """Index, row and state of those that have one."""
    pairs = enumerate(zip(rows, states, strict=True))
    return [(index, row, state) for index, (row, state) in pairs if state is not None]


def capacity(length: int) -> int:
    """Round up to GROWTH, for `length` tokens and at least one more."""
    return (length // GROWTH + 1) * GROWTH


def widened(array: mx.array, width: int, fill: int) -> mx.array:
    """Pad the last axis to `width`, if it is shorter."""
    missing = width - array.shape[-1]
    if missing <= 0:
        return array
    return mx.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)], constant_values=fill)


class TokenRows:
    """Tokens of k rows: `tokens` (k, W) int32, `lengths` (k,) on the host."""

    def __init__(self, rows: Sequence[RowTokens]) -> None:
        self._rows = rows
        self.lengths: NDArray[np.int64] = np.array([row.length for row in rows], np.int64)
        width = max(row.tokens.shape[0] for row in rows)
        self.tokens = mx.stack([widened(row.tokens, width, ABSENT) for row in rows])
        self._indices = mx.arange(len(rows))

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def append(self, tokens: mx.array, mask: NDArray[np.bool_] | None = None) -> None:
        """Append tokens (k,), or those of `mask` (k,)."""
        if self.lengths.max() >= self.width:
            self.tokens = widened(self.tokens, capacity(int(self.lengths.max())), ABSENT)
        added = tokens.astype(mx.int32) - ABSENT
        if mask is not None:
            added = mx.where(mx.array(mask), added, 0)
        # Of a row without a token to append, any.
        places = np.minimum(self.lengths, self.width - 1)
        self.tokens = self.tokens.at[self._indices, indices(places)].add(added)
        self.lengths = self.lengths + (1 if mask is None else mask)

    def copy(self) -> TokenRows:
        return copy(self)

    def unstack(self) -> None:
        """Write the tokens back to their rows."""
        for index, row in enumerate(self._rows):
            row.tokens, row.length = self.tokens[index], int(self.lengths[index])
