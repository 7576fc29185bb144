"""Copies out of and into rows: tokens of blocks or other rows, and snapshots of rings and
states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from trouper.engine.kv.banks import Banks
from trouper.engine.kv.kv_layout import Layout, dealt
from trouper.engine.kv.recurrent_state import StateRows
from trouper.engine.kv.slot_buffers import ALL
from trouper.engine.platform.eager_eval import copied
from trouper.protocol.plans import RowId


class RowCopies:
    """Copies for `BlockStore`, which decides."""

    def __init__(
        self, banks: Banks, states: StateRows, layout: Callable[[], Layout], slack: int
    ) -> None:
        """`slack`: tokens of rings beyond the window. `layout` is called late, since the model is
        tried."""
        self._banks, self._states, self._layout, self._slack = banks, states, layout, slack

    @property
    def layout(self) -> Layout:
        return self._layout()

    def length(self, row: RowId) -> int:
        return self._banks[row].slots.length(row)

    def read(self, row: RowId, start: int, stop: int) -> list[mx.array]:
        """As `SlotBuffers.read`."""
        assert 0 <= start < stop <= self.length(row), "tokens that the row does not have"
        bank = self._banks[row]
        return bank.buffers.read(bank.slots.slot(row), start, stop)

    def write(self, row: RowId, parts: Sequence[mx.array], room: int, leaves: slice = ALL) -> None:
        """As `SlotBuffers.write`, behind the row's last token; `advance` follows."""
        bank = self._banks[row]
        bank.buffers.write(bank.slots.slot(row), self.length(row), parts, room, leaves)

    def can_begin_with(self, row: RowId) -> bool:
        return self._banks[row].buffers.can_begin_with

    def begin_with(self, row: RowId, parts: Sequence[Sequence[mx.array]], room: int) -> None:
        """As `SlotBuffers.begin_with`."""
        self._banks[row].buffers.begin_with(parts, room)

    def advance(self, row: RowId, tokens: int) -> None:
        slots = self._banks[row].slots
        slots.lengths[slots.slot(row)] += tokens

    def extend(self, row: RowId, source: RowId, tokens: int) -> None:
        """Copy lacking tokens up to `tokens` from another row."""
        start = self.length(row)
        self.write(row, copied(self.read(source, start, tokens)), tokens)
        self.advance(row, tokens - start)

    def start(self, row: RowId, leaves: slice = ALL) -> None:
        self._banks[row].buffers.start(leaves)

    def snapshot(self, row: RowId, length: int) -> list[mx.array]:
        """Copy rings, then states, as after `length` tokens: now, or up to two drafting steps
        ago."""
        # The rings' slack is for three: rejected drafts lie behind the present length.
        beyond = self.length(row) - length
        assert 0 <= beyond <= self._slack * 2 // 3, (
            "a snapshot is of now, or of what rings still hold"
        )
        bank = self._banks[row]
        states = (
            self._states.snapshot_at(row, length)
            if beyond and self._states
            else self._states.snapshot(row)
        )
        return bank.buffers.snapshot(bank.slots.slot(row), length) + states

    def restore_snapshot(self, row: RowId, parts: Sequence[mx.array]) -> None:
        """Write the snapshot of a row of the same length."""
        bank, rings = self._banks[row], sum(map(len, self.layout.rings))
        bank.buffers.restore_snapshot(bank.slots.slot(row), self.length(row), parts[:rings])
        self._states.restore(row, dealt(parts[rings:], self.layout.states))
        mx.async_eval(self._states.state())
