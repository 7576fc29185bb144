"""Banks: rows of like length share buffers, as long as the longest row."""

# A bank of level 0 holds rows up to `Shapes.first_bank` tokens; each level doubles the length. A
# row that outgrows a bank moves to the next level: one copy, as long as the row. Rows move early,
# one a step, and if all rows outgrow a bank without a successor, the bank takes the next level. A
# very long row has a bank alone, without masks. Attention is called once for each bank
# (`attention_seam.py`); everything else in a layer runs over all rows. Figures:
# docs/long-contexts.md.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import attrs

from trouper.engine.kv.full_slots import FullSlots
from trouper.engine.kv.slot_buffers import SlotAssignment, SlotBuffers
from trouper.engine.passes.pass_shapes import Shapes
from trouper.protocol.kv import BankStats
from trouper.protocol.plans import NO_ROW, RowId


class Key(NamedTuple):
    """Identity of a bank, ordered by the length of rows."""

    level: int
    row: RowId


@attrs.frozen(eq=False)
class Bank:
    key: Key
    buffers: SlotBuffers
    slots: SlotAssignment = attrs.field(factory=SlotAssignment)

    @property
    def num_slots(self) -> int:
        slots = (cache.buffers[0].shape[0] for cache in self.buffers.leaves if cache.buffers)
        return max(slots, default=len(self.slots))

    @property
    def capacity_tokens(self) -> int:
        """Tokens of room in a slot: the mean over layers; rings count only without other caches."""
        caches = [
            cache for cache in self.buffers.leaves if isinstance(cache, FullSlots)
        ] or self.buffers.leaves
        lengths = [cache.buffers[0].shape[2] for cache in caches if cache.buffers]
        return round(sum(lengths) / len(lengths)) if lengths else 0

    def open(self, row: RowId, tokens: int) -> None:
        """`tokens`: the coming length."""
        self.slots.open(row)
        self.buffers.expect(tokens)
        self.buffers.hold(len(self.slots))

    def promote(self, row: RowId) -> None:
        """Make a prefilling row the last decoding row; the first prefilling row gets the free
        slot."""
        slot, first = self.slots.slot(row), self.slots.num_decoding
        if slot != first:
            self.buffers.move([(slot, first), (first, slot)], self.slots.lengths)
        self.slots.promote(slot)

    def drop(self, rows: Sequence[RowId]) -> None:
        """Remove rows. Much too large buffers shrink, and are freed with the last row."""
        change = self.slots.without(rows)
        self.buffers.move(change.moves, self.slots.lengths)
        self.slots.rearrange(change)
        if len(self.slots):
            exactly = len(self.slots) == 1 or not self.buffers.spares
            self.buffers.fit(len(self.slots), self.slots.longest + 1, exactly=exactly)
        else:
            self.buffers.clear()

    def move(self, row: RowId, target: Bank) -> None:
        slot = self.slots.slot(row)
        length = int(self.slots.lengths[slot])
        parts = self.buffers.take(slot, length)
        target.open(row, length + 1)
        target.buffers.put(target.slots.slot(row), length, parts)
        target.slots.lengths[target.slots.slot(row)] = length
        target.promote(row)
        self.drop([row])


class Banks:
    """All banks with rows, longest rows first: a new short row changes no index of others in a
    pass."""

    def __init__(
        self, make_buffers: Callable[[], SlotBuffers], shapes: Shapes, *, several: bool
    ) -> None:
        self._make_buffers, self._shapes, self._several = make_buffers, shapes, several
        self._banks: dict[Key, Bank] = {}
        self._bank_of: dict[RowId, Bank] = {}
        self._spares = True

    def __iter__(self) -> Iterator[Bank]:
        return iter(self._banks.values())

    def __len__(self) -> int:
        return len(self._banks)

    def __getitem__(self, row: RowId) -> Bank:
        return self._bank_of[row]

    @property
    def decoding(self) -> Sequence[RowId]:
        return [row for bank in self for row in bank.slots.decoding]

    @property
    def prefilling(self) -> Sequence[RowId]:
        return [row for bank in self for row in bank.slots.prefilling]

    def stats(self, state_bytes: int) -> tuple[BankStats, ...]:
        """State of the banks by level, shortest rows first. `state_bytes`: all rows' recurrent
        states, counted by the share of rows."""
        return tuple(
            BankStats(
                max_tokens=self._shapes.bank_tokens(level) if self._several else None,
                capacity_tokens=max(bank.capacity_tokens for bank in banks),
                rows=(rows := sum(len(bank.slots) for bank in banks)),
                slots=sum(bank.num_slots for bank in banks),
                bytes=sum(bank.buffers.nbytes for bank in banks)
                + state_bytes * rows // len(self._bank_of),
            )
            for level, group in groupby(reversed(self._banks.values()), lambda bank: bank.key.level)
            if (banks := [bank for bank in group if len(bank.slots)])
        )

    @property
    def nbytes(self) -> int:
        return sum(bank.buffers.nbytes for bank in self)

    def fit(self) -> None:
        for bank in self:
            if len(bank.slots):
                bank.buffers.fit(len(bank.slots), bank.slots.longest + 1, exactly=True)

    def clean(self) -> None:
        """Set non-finite numbers to 0."""
        for bank in self:
            bank.buffers.clean()

    def set_spares(self, *, spares: bool) -> None:
        """Set whether buffers may have room to spare; without, each change of rows fits them."""
        if spares != self._spares:
            self._spares = spares
            for bank in self:
                bank.buffers.spares = spares
        if not spares:
            self.fit()

    def hold(self, lengths: Sequence[int]) -> None:
        """Make room for new rows of these lengths at once."""
        keys = Counter(self._key(tokens, NO_ROW) for tokens in lengths)
        for key, rows in keys.items():
            if self._shapes.shared(key.level) or not self._several:
                bank = self._bank(key)
                bank.buffers.hold(len(bank.slots) + rows)

    def open(self, row: RowId, tokens: int) -> None:
        """`tokens`: the length when decoding."""
        self._bank_of[row] = bank = self._bank(self._key(tokens, row))
        bank.open(row, tokens)

    def drop(self, rows: Sequence[RowId]) -> None:
        for bank in list(self):
            dropped = [row for row in rows if self._bank_of[row] is bank]
            if dropped:
                bank.drop(dropped)
                self._free(bank)
        for row in rows:
            del self._bank_of[row]

    def move_outgrown(self) -> None:
        """Move decoding rows whose next token belongs to another bank: the longest, and all without
        room."""
        for bank in reversed(list(self)):
            if (
                self._several
                and bank.slots.num_decoding
                and self._level(bank.slots.longest + 1) > bank.key.level
            ):
                rows = self._outgrown(bank)
                targets = {self._key(length + 1, row) for row, length in rows.items()}
                if (
                    len(rows) == len(bank.slots)
                    and len(targets) == 1
                    and targets.isdisjoint(self._banks)
                ):
                    self._rename(bank, targets.pop())
                else:
                    self._move(bank, rows)

    def _outgrown(self, bank: Bank) -> dict[RowId, int]:
        # Decoding rows that belong to another bank, with their lengths.
        lengths = zip(bank.slots.decoding, bank.slots.lengths.tolist(), strict=False)
        return {row: length for row, length in lengths if self._level(length + 1) > bank.key.level}

    def _rename(self, bank: Bank, key: Key) -> None:
        # Give a bank another level. The buffers grow with the rows.
        del self._banks[bank.key]
        self._banks[key] = renamed = attrs.evolve(bank, key=key)
        self._banks = dict(sorted(self._banks.items(), reverse=True))
        self._bank_of |= dict.fromkeys(bank.slots.order, renamed)

    def _move(self, bank: Bank, rows: dict[RowId, int]) -> None:
        bound = self._shapes.bank_tokens(bank.key.level)
        longest = max(rows, key=rows.__getitem__, default=None)
        for row, length in rows.items():
            if length >= bound or row == longest:
                self._bank_of[row] = target = self._bank(self._key(length + 1, row))
                bank.move(row, target)
        self._free(bank)

    def _level(self, tokens: int) -> int:
        return self._shapes.level(tokens) if self._several else 0

    def _key(self, tokens: int, row: RowId) -> Key:
        # Key of the bank for a row of `tokens` tokens.
        level = self._level(tokens)
        return Key(level, row if self._several and not self._shapes.shared(level) else NO_ROW)

    def _bank(self, key: Key) -> Bank:
        if key not in self._banks:
            self._banks[key] = bank = Bank(key, self._make_buffers())
            bank.buffers.spares = self._spares
            self._banks = dict(sorted(self._banks.items(), reverse=True))
        return self._banks[key]

    def _free(self, bank: Bank) -> None:
        if not len(bank.slots):
            del self._banks[bank.key]
