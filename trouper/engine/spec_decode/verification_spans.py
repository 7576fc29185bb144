"""Verification of drafts: several positions of each row, sampled as if each were a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.engine.passes.region import Ints


# Row i runs its last token and `counts[i] - 1` draft tokens. A draft token is accepted if it equals
# the token sampled at its position; the first other one ends the span. The result equals the one
# without drafts, at any temperature, since the noise is a hash of the position.
class Spans:
    """Positions of n rows, row by row. `width`: positions of the longest row."""

    def __init__(self, drafts: Sequence[Sequence[int]]) -> None:
        """`drafts`: the draft of each row; at least one is not empty."""
        self.counts: Ints = np.array([1 + len(draft) for draft in drafts], np.int32)
        self.width = int(self.counts.max())
        self.drafts: Ints = np.zeros((len(drafts), self.width - 1), np.int32)
        """(n, width - 1): draft tokens, padded with zeros."""
        drafted = np.arange(self.width - 1) < self.counts[:, None] - 1
        self.drafts[drafted] = np.fromiter(chain.from_iterable(drafts), np.int32)
        self.max_accepted: Ints = self.counts - 1
        """(n,): maximum number of accepted tokens, lowered where a grammar failed."""

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """(positions,): row of each position."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """(n,): first position of each row."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """(positions,): number of draft tokens before each position."""
        return np.arange(len(self.owners)) - self.starts[self.owners]

    @cached_property
    def grid_indices(self) -> NDArray[np.int64]:
        """(positions,): index in a flattened grid (n, width)."""
        return self.owners * self.width + self.steps

    @property
    def padded(self) -> bool:
        return len(self.owners) < len(self.counts) * self.width

    def of(self, rows: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return all positions of these rows, which may repeat: (positions, index into `rows`)."""
        counts = self.counts[rows]
        index = np.repeat(np.arange(len(rows)), counts)
        steps = np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
        return self.starts[rows][index] + steps, index

    def before(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the draft tokens before each position: (index into `positions`, token)."""
        steps = self.steps[positions]
        index = np.repeat(np.arange(len(positions)), steps)
        column = np.arange(len(index)) - (np.cumsum(steps) - steps)[index]
        return index, self.drafts[self.owners[positions][index], column]

    def kept_of(
        self, rows: NDArray[Any], kept: NDArray[np.bool_]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Yield the next position of each of these rows, and whether it is kept, step by step.
        kept: (positions,)."""
        for step in range(int(self.counts[rows].max())):
            there = self.counts[rows] > step
            positions = self.starts[rows] + np.where(there, step, 0)
            if (mask := there & kept[positions]).any():
                yield positions, mask

    def drafts_of(self, row: int) -> list[int]:
        draft: list[int] = self.drafts[row, : self.counts[row] - 1].tolist()
        return draft

    def accepted(self, sampled: Ints) -> Ints:
        """Count the accepted tokens of each row, (n,), from the sampled tokens (positions,)."""
        grid = np.zeros(len(self.counts) * self.width, np.int32)
        grid[self.grid_indices] = sampled
        right = grid.reshape(-1, self.width)[:, :-1] == self.drafts
        right &= np.arange(self.width - 1) < self.max_accepted[:, None]
        return np.cumprod(right, axis=1).sum(axis=1).astype(np.int32)


def indices(host: NDArray[Any]) -> mx.array:
    """Make an int32 index array on the device."""
    return mx.array(host.astype(np.int32))
