"""Rows and their KV: who is in which slot, and the forward passes over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from trouper.engine.architecture import Batching, batching_of, flatten, slot_caches, view
from trouper.engine.region import Ints, Region
from trouper.engine.states import StateSlots
from trouper.protocol.plans import RowId

PADDING_WORTH = 1.25
"""Prefill prompts in one padded pass while that computes at most so many times their own tokens."""


class Rows(Protocol):
    """Rows that prefill, and rows that decode together. All arrays stay lazy."""

    @property
    def decoding(self) -> Sequence[RowId]:
        """In the order of logits."""

    def open(self, row: RowId) -> None:
        """A new row, without KV, to be prefilled."""

    def prefill(self, chunks: Mapping[RowId, Sequence[int]]) -> mx.array | None:
        """Run these tokens of prefilling rows; nothing is sampled. Returns something small to wait for."""

    def promote(self, row: RowId) -> None:
        """A prefilling row decodes from now on, as the last of them."""

    def decodes_from_nothing(self, row: RowId) -> bool:
        """False for a row whose first token must run alone (`first`): it has no recurrent state to join others with."""

    def first(self, row: RowId, token: int) -> mx.array:
        """Run the first token of a prefilling row alone; logits (1, vocabulary)."""

    def decode(self, tokens: mx.array) -> mx.array:
        """(n,) one token for each decoding row; logits (n, vocabulary) for the next."""

    def drop(self, rows: Sequence[RowId]) -> None: ...

    def lengths(self) -> dict[RowId, int]:
        """Tokens in each row's KV."""

    @property
    def nbytes(self) -> int: ...


def rows_for(model: nn.Module) -> tuple[Rows, Batching]:
    batching = batching_of(model)
    return (SlotRows(model, batching) if batching.together else SingleRows(model)), batching


class SlotRows:
    """Decoding rows fill slots [0, n), prefilling rows [n, m): each pass is over a contiguous range, so no row's KV is
    gathered. Only a row that leaves, or overtakes an older one, moves KV."""

    def __init__(self, model: nn.Module, batching: Batching) -> None:
        self._model = model
        self._together = batching.prefill_together
        self._caches = slot_caches(model)
        self._leaves = flatten(self._caches)
        self._order: list[RowId] = []
        self._lengths = np.zeros(0, np.int32)
        self._decoding = 0

    @property
    def decoding(self) -> Sequence[RowId]:
        return self._order[: self._decoding]

    def open(self, row: RowId) -> None:
        self._order.append(row)
        self._lengths = np.append(self._lengths, np.int32(0))
        for cache in self._leaves:
            if isinstance(cache, StateSlots):
                cache.open()
            else:
                cache.hold(len(self._order))

    def prefill(self, chunks: Mapping[RowId, Sequence[int]]) -> mx.array | None:
        waiting = self._order[self._decoding :]
        counts = np.array([len(chunks.get(row, ())) for row in waiting], np.int32)
        if not counts.any():
            return None
        if self._together and int(counts.max()) * len(waiting) <= PADDING_WORTH * counts.sum():
            return self._prefill_padded(waiting, chunks, counts)
        done = None
        for place, row in enumerate(waiting, self._decoding):
            if chunks.get(row):
                tokens = np.array([chunks[row]], np.int32)
                done = self._prefill(place, tokens, np.array([tokens.shape[1]], np.int32))
        return done

    def _prefill_padded(self, rows: Sequence[RowId], chunks: Mapping[RowId, Sequence[int]], counts: Ints) -> mx.array:
        tokens = np.zeros((len(rows), int(counts.max())), np.int32)
        for place, row in enumerate(rows):
            tokens[place, : counts[place]] = chunks.get(row, ())
        return self._prefill(self._decoding, tokens, counts)

    def _prefill(self, start: int, tokens: Ints, counts: Ints) -> mx.array:
        self._forward(start, mx.array(tokens), counts)
        return start_computing([state for cache in self._leaves for state in cache.state()])

    def promote(self, row: RowId) -> None:
        place = self._order.index(row, self._decoding)
        first = self._decoding
        for cache in self._leaves:
            if isinstance(cache, StateSlots):
                cache.promote(place - first)
            elif place != first:
                cache.swap(place, first)
        self._order[place], self._order[first] = self._order[first], self._order[place]
        self._lengths[[place, first]] = self._lengths[[first, place]]
        self._decoding += 1

    def decodes_from_nothing(self, row: RowId) -> bool:
        return self._together or bool(self._lengths[self._order.index(row)])

    def first(self, row: RowId, token: int) -> mx.array:
        return self._forward(self._order.index(row), mx.array([[token]]), np.ones(1, np.int32))[:, -1, :]

    def decode(self, tokens: mx.array) -> mx.array:
        logits = self._forward(0, tokens[:, None], np.ones(self._decoding, np.int32))
        return logits[:, -1, :]

    def _forward(self, start: int, tokens: mx.array, counts: Ints) -> mx.array:
        rows, width = tokens.shape
        region = Region(start, self._lengths[start : start + rows].copy(), counts, width)
        for cache in self._leaves:
            cache.begin(region)
        logits: mx.array = self._model(tokens, cache=[view(cache) for cache in self._caches])
        for cache in self._leaves:
            cache.finish()
        self._lengths[start : start + rows] += counts
        return logits

    def drop(self, rows: Sequence[RowId]) -> None:
        if not rows:
            return
        gone = set(rows)
        kept = [place for place, row in enumerate(self._order) if row not in gone]
        assert len(kept) + len(gone) == len(self._order), "a row was dropped that is not here"
        decoding = [place for place in kept if place < self._decoding]
        moves, arranged = compact(decoding, [place for place in kept if place >= self._decoding])
        self._rearrange(moves, arranged, len(decoding))

    def _rearrange(self, moves: list[tuple[int, int]], arranged: list[int], decoding: int) -> None:
        """`arranged`: for each new slot the old one."""
        first = self._decoding
        for cache in self._leaves:
            if isinstance(cache, StateSlots):
                cache.keep(arranged[:decoding], [place - first for place in arranged[decoding:]])
            else:
                for source, target in moves:
                    cache.move(source, target)
        self._order = [self._order[place] for place in arranged]
        self._lengths = self._lengths[arranged]
        self._decoding = decoding
        for cache in self._leaves:
            if not self._order:
                cache.clear()
            elif not isinstance(cache, StateSlots):
                cache.fit(len(self._order), int(self._lengths.max()) + 1)

    def lengths(self) -> dict[RowId, int]:
        return dict(zip(self._order, self._lengths.tolist(), strict=True))

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._leaves)


def start_computing(states: list[mx.array]) -> mx.array:
    """Start the device on a prefill. Returns one value that is there when it is done: a copy of an element, since
    holding a whole buffer would make its next update a copy of all of it."""
    done = mx.array(0) + states[-1].reshape(-1)[:1].astype(mx.float32)
    mx.async_eval(states, done)
    return done


def compact(decoding: list[int], prefilling: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Close the holes in two neighbouring ranges of slots with the fewest moves.

    Takes the surviving slots of each, ascending. Returns the moves (source, target), to be made in
    order, and for each new slot the old one.
    """
    moves: list[tuple[int, int]] = []
    arranged: list[int] = []
    for kept in (decoding, prefilling):
        start, stop = len(arranged), len(arranged) + len(kept)
        stay = {place for place in kept if start <= place < stop}
        movers = iter(reversed([place for place in kept if place not in stay]))
        for slot in range(start, stop):
            source = slot if slot in stay else next(movers)
            arranged.append(source)
            if source != slot:
                moves.append((source, slot))
    return moves, arranged


class SingleRows:
    """Rows that cannot share a pass: each has the model's own caches, and steps alone. Correct before fast."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._caches: dict[RowId, list[Any]] = {}
        self._lengths: dict[RowId, int] = {}
        self._decoding: list[RowId] = []

    @property
    def decoding(self) -> Sequence[RowId]:
        return self._decoding

    def open(self, row: RowId) -> None:
        self._caches[row] = make_prompt_cache(self._model)
        self._lengths[row] = 0

    def prefill(self, chunks: Mapping[RowId, Sequence[int]]) -> mx.array | None:
        done = None
        for row, tokens in chunks.items():
            if tokens:
                self._forward(row, mx.array([tokens]))
                states = tree_flatten([cache.state for cache in self._caches[row]])
                done = start_computing([state for _, state in states if isinstance(state, mx.array)])
        return done

    def promote(self, row: RowId) -> None:
        self._decoding.append(row)

    def decodes_from_nothing(self, row: RowId) -> bool:  # noqa: ARG002  Each runs alone anyway.
        return True

    def first(self, row: RowId, token: int) -> mx.array:
        return self._forward(row, mx.array([[token]]))[:, -1, :]

    def decode(self, tokens: mx.array) -> mx.array:
        rows = [self._forward(row, tokens[place : place + 1, None]) for place, row in enumerate(self._decoding)]
        return mx.concatenate([logits[:, -1, :] for logits in rows])

    def _forward(self, row: RowId, tokens: mx.array) -> mx.array:
        self._lengths[row] += tokens.shape[1]
        logits: mx.array = self._model(tokens, cache=self._caches[row])
        return logits

    def drop(self, rows: Sequence[RowId]) -> None:
        for row in rows:
            del self._caches[row], self._lengths[row]
        self._decoding = [row for row in self._decoding if row in self._caches]

    def lengths(self) -> dict[RowId, int]:
        return dict(self._lengths)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for caches in self._caches.values() for cache in caches)
