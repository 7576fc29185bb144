"""Rows and their KV: the assignment of rows to slots, and the forward passes over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.kv.kv_layout import Layout, dealt, layout_of
from trouper.engine.kv.pass_shapes import EXACT, STEP, Shapes
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.kv.recurrent_state import StateSlots
from trouper.engine.kv.region import Ints, Region
from trouper.engine.kv.single_rows import SingleRows
from trouper.engine.kv.slot_cache import FullSlots, RingSlots, SlotCache
from trouper.engine.loading.architecture import flatten, guessed, slot_caches, view
from trouper.engine.platform.eager_eval import copied, start_eval
from trouper.engine.pooling import body_of
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.plans import RowId

ALL = slice(None)


class Rows(Protocol):
    """Rows that prefill, and rows that decode in one batch. All arrays stay lazy."""

    @property
    def decoding(self) -> Sequence[RowId]:
        """Decoding rows, in the order of the logits."""

    @property
    def order(self) -> Sequence[RowId]:
        """All rows; decoding rows come first."""

    def make_room(self, rows: int) -> None:
        """Make room for `rows` more rows at once: buffers that grow for each row would be copied each time."""

    def give_back(self) -> None:
        """Release the memory that the present rows do not need."""

    def open(self, row: RowId) -> None:
        """Add a prefilling row without KV."""

    def prefill(self, chunks: Mapping[RowId, Sequence[int]]) -> mx.array | None:
        """Run these tokens of prefilling rows without sampling. Returns a small array that is ready when the prefill is done."""

    def score(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        """Run these tokens of a prefilling row alone; logits (tokens, vocabulary)."""

    def hidden(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        """Run these tokens of a prefilling row alone, without the model's head; hidden states (tokens, dim)."""

    def promote(self, row: RowId) -> None:
        """Make a prefilling row the last decoding row."""

    def decodes_from_nothing(self, row: RowId) -> bool:
        """Whether the row may decode in the batch at once. False for a row without recurrent state to join the batch with: its
        first token must run alone (`first`)."""

    def first(self, row: RowId, token: int) -> mx.array:
        """Run the first token of a prefilling row alone; logits (1, vocabulary)."""

    def decode(self, tokens: mx.array) -> mx.array:
        """Run (n,) tokens, one for each decoding row; logits (n, vocabulary) for the next token."""

    def verify(self, tokens: mx.array, counts: Ints) -> mx.array:
        """Run (n, width) tokens of the decoding rows, of which counts[i] are row i's own and the others padding; logits (n,
        width, vocabulary). Each row grows by one token; `accepted` adds the accepted drafts."""

    def accepted(self, more: Ints) -> None:
        """Keep the KV of `more` (n,) tokens of each row besides the first."""

    def drop(self, rows: Sequence[RowId]) -> None: ...

    def lengths(self) -> dict[RowId, int]:
        """Tokens in each row's KV."""

    @property
    def nbytes(self) -> int: ...


def rows_for(
    model: nn.Module, kv: KvFormat, slack: int = 0, shapes: Shapes = EXACT, capabilities: Capabilities | None = None
) -> tuple[Rows, Capabilities]:
    """Make the rows for a model, and return them with its capabilities. `capabilities` None: guessed from its caches."""
    found = guessed(model) if capabilities is None else capabilities
    return (SlotRows(model, found, kv, slack, shapes) if found.allows("batch") else SingleRows(model)), found


class SlotRows:
    """Rows in slots. Decoding rows fill slots [0, n), prefilling rows [n, m): each pass is over a contiguous range, so no
    row's KV is gathered. KV moves only when a row is dropped, or is promoted before an older one."""

    def __init__(
        self, model: nn.Module, capabilities: Capabilities, kv: KvFormat, slack: int = 0, shapes: Shapes = EXACT
    ) -> None:
        self._model = model
        self._kv = kv
        self._shapes = shapes
        self._prefill_together = capabilities.allows("prefill_together")
        self._slack = slack
        self._caches = slot_caches(model, kv, slack)
        self._leaves = flatten(self._caches)
        self._adapted = adapted(model)
        self._full = [cache for cache in self._leaves if isinstance(cache, FullSlots)]
        self._rings = [cache for cache in self._leaves if isinstance(cache, RingSlots)]
        self._states = [cache for cache in self._leaves if isinstance(cache, StateSlots)]
        for index, cache in enumerate(self._full):
            cache.shapes = shapes
            cache.phase = 0 if shapes.rounded else index * STEP // len(self._full)
        self._order: list[RowId] = []
        self._lengths = np.zeros(0, np.int32)
        self._decoding = 0

    @property
    def decoding(self) -> Sequence[RowId]:
        return self._order[: self._decoding]

    @property
    def order(self) -> Sequence[RowId]:
        return self._order

    def make_room(self, rows: int) -> None:
        for cache in self._leaves:
            if not isinstance(cache, StateSlots):
                cache.hold(len(self._order) + rows)

    def give_back(self) -> None:
        for cache in self._leaves if self._order else ():
            if not isinstance(cache, StateSlots):
                cache.fit(len(self._order), int(self._lengths.max()) + 1, exactly=True)

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
        done = None
        for group in self._groups(counts.tolist()):
            rows, parts_here = waiting[group.start : group.stop], counts[group.start : group.stop]
            tokens = np.zeros((len(rows), int(parts_here.max())), np.int32)
            for index, row in enumerate(rows):
                tokens[index, : parts_here[index]] = chunks.get(row, ())
            done = self._prefill(self._decoding + group.start, tokens, parts_here)
        return done

    def _groups(self, counts: list[int]) -> list[range]:
        """Partition the prefilling rows into passes. Recurrent state would absorb padding, so there each row runs alone."""
        if self._prefill_together:
            return self._shapes.groups(counts)
        return [range(index, index + 1) for index, count in enumerate(counts) if count]

    def _prefill(self, start: int, tokens: Ints, counts: Ints) -> mx.array:
        self._forward(start, mx.array(tokens), counts)
        return start_eval([state for cache in self._leaves for state in cache.state()])

    def score(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        inputs = mx.array(np.array([tokens], np.int32))
        return self._forward(self._order.index(row), inputs, np.array([len(tokens)], np.int32))[0]

    def hidden(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        inputs = mx.array(np.array([tokens], np.int32))
        return self._forward(self._order.index(row), inputs, np.array([len(tokens)], np.int32), self._body)[0]

    @cached_property
    def _body(self) -> nn.Module | None:
        return body_of(self._model)

    def promote(self, row: RowId) -> None:
        index = self._order.index(row, self._decoding)
        first = self._decoding
        for cache in self._leaves:
            if isinstance(cache, StateSlots):
                cache.promote(index - first)
        if index != first:
            self._move([(index, first), (first, index)])
        self._order[index], self._order[first] = self._order[first], self._order[index]
        self._lengths[[index, first]] = self._lengths[[first, index]]
        self._decoding += 1

    def decodes_from_nothing(self, row: RowId) -> bool:
        return self._prefill_together or bool(self._lengths[self._order.index(row)])

    def first(self, row: RowId, token: int) -> mx.array:
        return self._forward(self._order.index(row), mx.array([[token]]), np.ones(1, np.int32))[:, -1, :]

    def decode(self, tokens: mx.array) -> mx.array:
        logits = self._forward(0, tokens[:, None], np.ones(self._decoding, np.int32))
        return logits[:, -1, :]

    def verify(self, tokens: mx.array, counts: Ints) -> mx.array:
        assert not self._states, "recurrent state cannot be taken back"
        logits = self._forward(0, tokens, counts, singly=True)
        self._lengths[: self._decoding] -= counts - 1
        return logits

    def accepted(self, more: Ints) -> None:
        self._lengths[: self._decoding] += more

    def _forward(
        self, start: int, tokens: mx.array, counts: Ints, part: nn.Module | None = None, *, singly: bool = False
    ) -> mx.array:
        rows, width = tokens.shape
        wide = width if self._states else self._shapes.width(width)
        if wide > width:
            tokens = mx.pad(tokens, [(0, 0), (0, wide - width)])
        region = Region(start, self._lengths[start : start + rows].copy(), counts, wide, self._shapes, singly=singly)
        for cache in self._leaves:
            cache.begin(region)
        with self._adapted.during(region):
            logits: mx.array = (part or self._model)(tokens, cache=[view(cache) for cache in self._caches])
        for cache in self._leaves:
            cache.finish()
        self._lengths[start : start + rows] += counts
        return logits[:, :width] if wide > width else logits

    def drop(self, rows: Sequence[RowId]) -> None:
        if not rows:
            return
        dropped = set(rows)
        kept = [index for index, row in enumerate(self._order) if row not in dropped]
        assert len(kept) + len(dropped) == len(self._order), "a row was dropped that is not here"
        decoding = [index for index in kept if index < self._decoding]
        moves, arranged = compact(decoding, [index for index in kept if index >= self._decoding])
        self._rearrange(moves, arranged, len(decoding))

    def _rearrange(self, moves: list[tuple[int, int]], arranged: list[int], decoding: int) -> None:
        """Move rows to new slots. `arranged`: for each new slot the old one."""
        first = self._decoding
        for cache in self._leaves:
            if isinstance(cache, StateSlots):
                cache.keep(arranged[:decoding], [index - first for index in arranged[decoding:]])
        self._move(moves)
        self._order = [self._order[index] for index in arranged]
        self._lengths = self._lengths[arranged]
        self._decoding = decoding
        for cache in self._leaves:
            if not self._order:
                cache.clear()
            elif not isinstance(cache, StateSlots):
                cache.fit(len(self._order), int(self._lengths.max()) + 1)

    def _move(self, moves: list[tuple[int, int]]) -> None:
        """Copy rows from slot to slot, all at once. Rows without KV are skipped."""
        moves = [(source, target) for source, target in moves if self._lengths[source]]
        caches = [cache for cache in self._leaves if isinstance(cache, SlotCache) and cache.buffers]
        copies = iter(
            copied(
                view
                for cache in caches
                for source, _ in moves
                for view in cache.row(source, int(self._lengths[source]))
            )
        )
        for cache in caches:
            for _, target in moves:
                cache.put_row(target, [next(copies) for _ in cache.buffers])

    # -- blocks and snapshots: copied out of a row, and restored into another ----------------------

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self._model, self._kv)

    def length(self, row: RowId) -> int:
        return int(self._lengths[self._order.index(row)])

    def read(self, row: RowId, start: int, stop: int) -> list[mx.array]:
        """(heads, stop - start, dim) views of each buffer that can be cut at a token."""
        assert 0 <= start < stop <= self.length(row), "tokens that the row does not have"
        slot = self._order.index(row)
        return [view for cache in self._full for view in cache.read(slot, start, stop)]

    def write(self, row: RowId, parts: Sequence[mx.array], room: int, leaves: slice = ALL) -> None:
        """Write tokens behind the row's last one, in the form that `read` returns, into the layers `leaves`; make room for `room`
        tokens in all. `advance` then changes the row's length."""
        slot, start = self._order.index(row), self.length(row)
        for cache, parts_here in zip(self._full[leaves], dealt(parts, self.layout.full[leaves]), strict=True):
            if parts_here:
                cache.write(slot, start, parts_here, room)

    @property
    def can_begin_with(self) -> bool:
        """Whether there is only one row and no buffer yet, so that `begin_with` is allowed."""
        return not any(cache.buffers or cache.slots > 1 for cache in self._full)

    def begin_with(self, parts: Sequence[Sequence[mx.array]], room: int) -> None:
        """Make the buffers from the first tokens of the only row, given as pieces for each buffer."""
        for cache, parts_here in zip(self._full, dealt(parts, self.layout.full), strict=True):
            cache.begin_with(parts_here, room)

    def advance(self, row: RowId, tokens: int) -> None:
        """Increase the row's length by `tokens`, after they were written."""
        self._lengths[self._order.index(row)] += tokens

    def extend(self, row: RowId, source: RowId, tokens: int) -> None:
        """Copy the tokens up to `tokens` that the row lacks from another row."""
        start = self.length(row)
        self.write(row, copied(self.read(source, start, tokens)), tokens)
        self.advance(row, tokens - start)

    def snapshot(self, row: RowId, length: int) -> list[mx.array]:
        """Copy rings, then states, as they were after `length` tokens: the row's present length, or earlier as far as the slack of
        the rings reaches."""
        slot, beyond = self._order.index(row), self.length(row) - length
        assert beyond == 0 or (0 < beyond <= self._slack * 2 // 3 and not self._states), (
            "a snapshot is of now, or of what rings still hold"
        )
        rings = [part for cache in self._rings for part in cache.snapshot(slot, length)]
        return rings + [part for cache in self._states for part in cache.snapshot(slot)]

    def restore_snapshot(self, row: RowId, parts: Sequence[mx.array]) -> None:
        """Write the snapshot of a row of the same length into the row."""
        slot, length = self._order.index(row), self.length(row)
        rings = sum(map(len, self.layout.rings))
        for ring, parts_here in zip(self._rings, dealt(parts[:rings], self.layout.rings), strict=True):
            if parts_here:
                ring.restore(slot, length, parts_here)
        for states, parts_here in zip(self._states, dealt(parts[rings:], self.layout.states), strict=True):
            states.restore(slot, parts_here)
        mx.async_eval([ring.state() for ring in self._rings], [states.state() for states in self._states])

    def start(self, leaves: slice = ALL) -> None:
        """Start evaluating the buffers that were written."""
        mx.async_eval([state for cache in self._full[leaves] for state in cache.state()])

    def lengths(self) -> dict[RowId, int]:
        return dict(zip(self._order, self._lengths.tolist(), strict=True))

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self._leaves)


def compact(decoding: list[int], prefilling: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Close the holes in two neighbouring ranges of slots with the fewest moves.

    `decoding` and `prefilling` are the surviving slots of each range, ascending. Returns the moves (source, target), to be
    made in order, and for each new slot the old one.
    """
    moves: list[tuple[int, int]] = []
    arranged: list[int] = []
    for kept in (decoding, prefilling):
        start, stop = len(arranged), len(arranged) + len(kept)
        stay = {index for index in kept if start <= index < stop}
        movers = iter(reversed([index for index in kept if index not in stay]))
        for slot in range(start, stop):
            source = slot if slot in stay else next(movers)
            arranged.append(source)
            if source != slot:
                moves.append((source, slot))
    return moves, arranged
