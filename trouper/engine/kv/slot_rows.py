"""Rows in slots: the passes over them, and the blocks that are copied out of and into them.

A row's tokens lie in one slot of every layer's buffers (`slot_buffers.py`); `slot_assignment.py` knows which. A pass is over a
contiguous range of slots, a `Region`, so no row's KV is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.kv.kv_layout import Layout
from trouper.engine.kv.pass_shapes import EXACT, Shapes
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.kv.region import Ints, Region
from trouper.engine.kv.slot_assignment import SlotAssignment
from trouper.engine.kv.slot_buffers import ALL, SlotBuffers
from trouper.engine.platform.eager_eval import copied, start_eval
from trouper.engine.pooling import body_of
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.plans import RowId


class SlotRows:
    """Rows in slots (see `rows.Rows`). KV moves only when a row is dropped, or is promoted before an older one."""

    def __init__(
        self, model: nn.Module, capabilities: Capabilities, kv: KvFormat, slack: int = 0, shapes: Shapes = EXACT
    ) -> None:
        """`slack`: number of tokens that rings hold beyond their window."""
        self._model = model
        self._shapes = shapes
        self._slack = slack
        self._prefill_together = capabilities.allows("prefill_together")
        self._buffers = SlotBuffers(model, kv, slack, shapes)
        self._slots = SlotAssignment()
        self._adapted = adapted(model)

    @property
    def decoding(self) -> Sequence[RowId]:
        return self._slots.decoding

    @property
    def order(self) -> Sequence[RowId]:
        return self._slots.order

    def lengths(self) -> dict[RowId, int]:
        return dict(zip(self._slots.order, self._slots.lengths.tolist(), strict=True))

    def length(self, row: RowId) -> int:
        return self._slots.length(row)

    @property
    def nbytes(self) -> int:
        return self._buffers.nbytes

    # -- rows that enter, decode and leave -------------------------------------------------------

    def make_room(self, rows: int) -> None:
        self._buffers.hold(len(self._slots) + rows)

    def give_back(self) -> None:
        if len(self._slots):
            self._buffers.fit(len(self._slots), self._slots.longest + 1, exactly=True)

    def open(self, row: RowId) -> None:
        self._slots.open(row)
        self._buffers.open(self._slots.slot(row))

    def promote(self, row: RowId) -> None:
        first = self._slots.num_decoding
        slot = self._slots.order.index(row, first)
        self._buffers.promote(slot, first, self._slots.lengths)
        self._slots.promote(slot)

    def decodes_from_nothing(self, row: RowId) -> bool:
        return self._prefill_together or bool(self.length(row))

    def drop(self, rows: Sequence[RowId]) -> None:
        if not rows:
            return
        change = self._slots.without(rows)
        self._buffers.rearrange(change, self._slots.num_decoding, self._slots.lengths)
        self._slots.rearrange(change)
        if len(self._slots):
            self._buffers.fit(len(self._slots), self._slots.longest + 1)
        else:
            self._buffers.clear()

    # -- passes ----------------------------------------------------------------------------------

    def prefill(self, chunks: Mapping[RowId, Sequence[int]]) -> mx.array | None:
        first, prefilling = self._slots.num_decoding, self._slots.prefilling
        counts = np.array([len(chunks.get(row, ())) for row in prefilling], np.int32)
        done = None
        for group in self._groups(counts.tolist()):
            rows, counts_of_group = prefilling[group.start : group.stop], counts[group.start : group.stop]
            tokens = np.zeros((len(rows), int(counts_of_group.max())), np.int32)
            for index, row in enumerate(rows):
                tokens[index, : counts_of_group[index]] = chunks.get(row, ())
            self._forward(first + group.start, mx.array(tokens), counts_of_group)
            done = start_eval(self._buffers.state())
        return done

    def _groups(self, counts: list[int]) -> list[range]:
        """Partition the prefilling rows into passes. Recurrent state would absorb padding, so there each row runs alone."""
        if self._prefill_together:
            return self._shapes.groups(counts)
        return [range(index, index + 1) for index, count in enumerate(counts) if count]

    def score(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        return self._forward_alone(row, tokens)[0]

    def hidden(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        return self._forward_alone(row, tokens, self._body)[0]

    @cached_property
    def _body(self) -> nn.Module | None:
        return body_of(self._model)

    def first(self, row: RowId, token: int) -> mx.array:
        return self._forward(self._slots.slot(row), mx.array([[token]]), np.ones(1, np.int32))[:, -1, :]

    def decode(self, tokens: mx.array) -> mx.array:
        logits = self._forward(0, tokens[:, None], np.ones(self._slots.num_decoding, np.int32))
        return logits[:, -1, :]

    def verify(self, tokens: mx.array, counts: Ints) -> mx.array:
        assert not self._buffers.states, "recurrent state cannot be taken back"
        logits = self._forward(0, tokens, counts, singly=True)
        self._slots.lengths[: self._slots.num_decoding] -= counts - 1
        return logits

    def accepted(self, more: Ints) -> None:
        self._slots.lengths[: self._slots.num_decoding] += more

    def _forward_alone(self, row: RowId, tokens: Sequence[int], part: nn.Module | None = None) -> mx.array:
        inputs = mx.array(np.array([tokens], np.int32))
        return self._forward(self._slots.slot(row), inputs, np.array([len(tokens)], np.int32), part)

    def _forward(
        self, start: int, tokens: mx.array, counts: Ints, part: nn.Module | None = None, *, singly: bool = False
    ) -> mx.array:
        """Build the pass of the rows in slots from `start` on over tokens (n, width), of which counts[i] are row i's own. Returns
        logits (n, width, vocabulary), or what `part`, a part of the model, returns."""
        rows, width = tokens.shape
        wide = width if self._buffers.states else self._shapes.width(width)
        if wide > width:
            tokens = mx.pad(tokens, [(0, 0), (0, wide - width)])
        lengths = self._slots.lengths[start : start + rows]
        region = Region(start, lengths.copy(), counts, wide, self._shapes, singly=singly)
        caches = self._buffers.begin(region)
        with self._adapted.during(region):
            logits: mx.array = (part or self._model)(tokens, cache=caches)
        self._buffers.finish()
        lengths += counts
        return logits[:, :width] if wide > width else logits

    # -- blocks and snapshots: copied out of a row, and restored into another --------------------

    @property
    def layout(self) -> Layout:
        return self._buffers.layout

    def read(self, row: RowId, start: int, stop: int) -> list[mx.array]:
        """(heads, stop - start, dim) views of each buffer that can be cut at a token."""
        assert 0 <= start < stop <= self.length(row), "tokens that the row does not have"
        return self._buffers.read(self._slots.slot(row), start, stop)

    def write(self, row: RowId, parts: Sequence[mx.array], room: int, leaves: slice = ALL) -> None:
        """Write tokens behind the row's last one, in the form that `read` returns, into the layers `leaves`; make room for `room`
        tokens in all. `advance` then changes the row's length."""
        self._buffers.write(self._slots.slot(row), self.length(row), parts, room, leaves)

    @property
    def can_begin_with(self) -> bool:
        """Whether there is only one row and no buffer yet, so that `begin_with` is allowed."""
        return self._buffers.can_begin_with

    def begin_with(self, parts: Sequence[Sequence[mx.array]], room: int) -> None:
        """Make the buffers from the first tokens of the only row, given as pieces for each buffer."""
        self._buffers.begin_with(parts, room)

    def advance(self, row: RowId, tokens: int) -> None:
        """Increase the row's length by `tokens`, after they were written."""
        self._slots.lengths[self._slots.slot(row)] += tokens

    def extend(self, row: RowId, source: RowId, tokens: int) -> None:
        """Copy the tokens up to `tokens` that the row lacks from another row."""
        start = self.length(row)
        self.write(row, copied(self.read(source, start, tokens)), tokens)
        self.advance(row, tokens - start)

    def start(self, leaves: slice = ALL) -> None:
        """Start evaluating the buffers that were written."""
        self._buffers.start(leaves)

    def snapshot(self, row: RowId, length: int) -> list[mx.array]:
        """Copy rings, then states, as they were after `length` tokens: the row's present length, or earlier as far as the slack of
        the rings reaches."""
        beyond = self.length(row) - length
        assert beyond == 0 or (0 < beyond <= self._slack * 2 // 3 and not self._buffers.states), (
            "a snapshot is of now, or of what rings still hold"
        )
        return self._buffers.snapshot(self._slots.slot(row), length)

    def restore_snapshot(self, row: RowId, parts: Sequence[mx.array]) -> None:
        """Write the snapshot of a row of the same length into the row."""
        self._buffers.restore_snapshot(self._slots.slot(row), self.length(row), parts)
