"""A step that verifies drafts: several positions of each row, sampled as if each were a row of its own.

Row i goes in with its last token and `counts[i] - 1` drafted ones. What the model says after each of them is sampled like
any other logits, with what the row had drawn and said up to there. A draft is accepted if it is the token that was
sampled in its place; the first that is not ends it, and what was sampled instead is right (as without drafts, exactly).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from trouper.engine.kv.region import Ints


class Spans:
    """n rows, the longest of them `width` positions long. `positions` positions in all, row by row."""

    def __init__(self, drafts: Sequence[Sequence[int]]) -> None:
        """Of each row, in order; not all of them empty."""
        self.counts: Ints = np.array([1 + len(draft) for draft in drafts], np.int32)
        self.width = int(self.counts.max())
        self.drafts: Ints = np.zeros((len(drafts), self.width - 1), np.int32)
        """Zeros where there are fewer."""
        drafted = np.arange(self.width - 1) < self.counts[:, None] - 1
        self.drafts[drafted] = np.fromiter(chain.from_iterable(drafts), np.int32)
        self.max_accepted: Ints = self.counts - 1
        """Of each row's drafts no more can be right, whatever is sampled: lowered where a grammar gave up."""

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """(positions,): whose each is."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """(n,): the first position of each row."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """(positions,): how many drafted tokens come before each."""
        return np.arange(len(self.owners)) - self.starts[self.owners]

    @cached_property
    def grid_indices(self) -> NDArray[np.int64]:
        """(positions,): where each lies among n * width."""
        return self.owners * self.width + self.steps

    @property
    def padded(self) -> bool:
        return len(self.owners) < len(self.counts) * self.width

    def of(self, rows: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """All positions of these rows, which may repeat: (positions, for each the index into `rows`)."""
        counts = self.counts[rows]
        index = np.repeat(np.arange(len(rows)), counts)
        steps = np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
        return self.starts[rows][index] + steps, index

    def before(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The drafted tokens before each of these: (index into `positions`, token) of each."""
        steps = self.steps[positions]
        index = np.repeat(np.arange(len(positions)), steps)
        column = np.arange(len(index)) - (np.cumsum(steps) - steps)[index]
        return index, self.drafts[self.owners[positions][index], column]

    def drafts_of(self, row: int) -> list[int]:
        """One row's drafts."""
        draft: list[int] = self.drafts[row, : self.counts[row] - 1].tolist()
        return draft

    def accepted(self, sampled: Ints) -> Ints:
        """sampled (positions,): how many drafts of each row are right, (n,)."""
        grid = np.zeros(len(self.counts) * self.width, np.int32)
        grid[self.grid_indices] = sampled
        right = grid.reshape(-1, self.width)[:, :-1] == self.drafts
        right &= np.arange(self.width - 1) < self.max_accepted[:, None]
        return np.cumprod(right, axis=1).sum(axis=1).astype(np.int32)


def indices(host: NDArray[Any]) -> mx.array:
    """To index arrays of the device with."""
    return mx.array(host.astype(np.int32))
