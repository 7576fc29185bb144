"""Recurrent states of rows. Without positions padding cannot be masked: rows prefill alone. A pass
with drafts is recorded, and repeated for rows whose state took in more than the kept tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.kv.recorded_calls import (
    Partition,
    RecordedStates,
    Recording,
    RecurrentCache,
    each_alone,
    keeps_padding_out,
)
from trouper.engine.lora.row_adapters import RowAdapters
from trouper.engine.passes.pass_shapes import EXACT, Shapes
from trouper.engine.passes.region import Ints
from trouper.protocol.plans import RowId

# Steps back for which a snapshot may be wanted (see `protocol.plans.Store`).
STEPS_BACK = 2


class StateSlots:
    """Counterpart of one of mlx-lm's ArraysCaches. Decoding rows share one in pass order; each
    prefilling row has another."""

    # mlx-lm's batch prefill is wrong for models that ignore lengths (jamba, rwkv7, recurrent_gemma,
    # bailing_moe_linear), and for "no state yet", which some treat unlike zeros.

    def __init__(self, size: int, history: int | None = None) -> None:
        """`history`: the state is the last `history` tokens, padded with zeros."""
        self._size, self._history = size, history
        self._decoding, self._decoding_rows = RecurrentCache(size), 0
        self._prefilling: list[RecurrentCache] = []
        self._before: list[mx.array] = []
        self._current: RecurrentCache = self._decoding

    @property
    def view(self) -> RecurrentCache:
        return self._current

    def begin(self, prefilling: int | None = None) -> None:
        """Choose the next pass: all decoding rows, or the prefilling row of this index."""
        self._current = self._decoding if prefilling is None else self._prefilling[prefilling]

    def record(self, lengths: Ints | None = None) -> None:
        """Record the next pass, over all decoding rows. lengths: (n,) own tokens of each row, for
        models that keep padding out; None: states take in the whole pass."""
        self._before = [mx.array(state) for state in self._decoding.cache]
        self._decoding.lengths = None if lengths is None else mx.array(lengths)
        self._decoding.calls, self._decoding.reads_lengths = [], False

    def recorded(self) -> RecordedStates:
        """The recorded pass; recording ends."""
        calls, self._decoding.calls, self._decoding.lengths = self._decoding.calls, None, None
        before, self._before = self._before, []
        assert calls, "no module was seen to change this state"
        return RecordedStates(before, calls, self._decoding.reads_lengths)

    def put(self, rows: Ints | None, states: Sequence[mx.array]) -> None:
        """Set the states (m, ...) of these decoding rows; None: of all."""
        if rows is None:
            self._decoding.cache = list(states)
            return
        indices, cache = mx.array(rows), self._decoding.cache
        for number, (state, part) in enumerate(zip(cache, states, strict=True)):
            # Tokens of n-grams, which MLX writes nowhere on a GPU: as pairs of integers.
            if part.dtype == mx.int64:
                halves = state.view(mx.uint32)
                halves[indices] = part.view(mx.uint32)
                cache[number] = halves.view(mx.int64)
            else:
                state[indices] = part

    def finish(self) -> None:
        self._current = self._decoding

    def open(self) -> None:
        row = RecurrentCache(self._size)
        if self._history is not None:
            row[0] = mx.zeros((1, self._history), mx.int64)
        self._prefilling.append(row)

    def promote(self, index: int) -> None:
        """Make the prefilling row at `index` the last decoding row; the first one moves to
        `index`."""
        rows = self._prefilling
        rows[0], rows[index] = rows[index], rows[0]
        row = rows.pop(0)
        if self._decoding_rows == 0:
            self._decoding = row
        else:
            self._decoding.cache = [
                mx.concatenate([*pair])
                for pair in zip(self._decoding.cache, row.cache, strict=True)
            ]
        self._decoding_rows += 1

    def keep(self, decoding: list[int], prefilling: list[int]) -> None:
        """Keep these rows, in this order (indices within each kind)."""
        self._prefilling = [self._prefilling[index] for index in prefilling]
        if not decoding:
            self._decoding = RecurrentCache(self._size)
        elif decoding != list(range(self._decoding_rows)):
            order = mx.array(decoding)
            self._decoding.cache = [state[order] for state in self._decoding.cache]
        self._decoding_rows = len(decoding)

    def snapshot(self, index: int) -> list[mx.array]:
        """Copy the states (1, ...) of the row at `index`; decoding rows come first."""
        decoding = index < self._decoding_rows
        cache, row = (
            (self._decoding, index)
            if decoding
            else (self._prefilling[index - self._decoding_rows], 0)
        )
        return [state[mx.array([row])] for state in cache.cache]

    def restore(self, index: int, states: Sequence[mx.array]) -> None:
        """Set a prefilling row's states, as copies: models may assign to the arrays."""
        self._prefilling[index - self._decoding_rows].cache = [
            mx.contiguous(state) for state in states
        ]

    def state(self) -> list[mx.array]:
        """States (rows, ...) of decoding rows, then (1, ...) of each prefilling row."""
        caches = [self._decoding, *self._prefilling]
        return [state for cache in caches for state in cache.cache if state is not None]

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.state())


@attrs.define(eq=False)
class VerifiedPass:
    """A recorded pass of decoding rows. lengths: (n,) tokens before. taken_in: (n,) tokens in the
    states afterwards. kept: (n,) tokens kept, once known."""

    rows: Sequence[RowId]
    lengths: Ints
    taken_in: Ints
    layers: list[RecordedStates]
    recording: Recording
    kept: Ints = attrs.field(factory=lambda: np.zeros(0, np.int32))

    def after(self, row: RowId, length: int) -> list[mx.array] | None:
        """States (1, ...) after `length` tokens. None: the pass began later."""
        if row not in self.rows:
            return None
        index = self.rows.index(row)
        count = length - int(self.lengths[index])
        if count < 0:
            return None
        assert count <= self.kept[index], "states after tokens that the row does not have"
        [picked] = self.recording.picked(np.array([index], np.int32), np.array([count], np.int32))
        return [part for layer in self.layers for part in layer.after(picked)]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


class StateRows:
    def __init__(self, caches: Sequence[StateSlots], shapes: Shapes = EXACT) -> None:
        """`shapes`: decides which rows share a repeated pass."""
        self._caches, self._groups = caches, shapes.groups
        # Whether the model keeps padding out of states, which lets rows of different tokens share
        # passes; None: untried.
        self._pads: bool | None = None
        self._decoding: list[RowId] = []
        self._prefilling: list[RowId] = []
        # The last steps of decoding rows; None: one token each.
        self._verified: deque[VerifiedPass | None] = deque(maxlen=STEPS_BACK)

    def __bool__(self) -> bool:
        return bool(self._caches)

    def open(self, row: RowId) -> None:
        self._prefilling.append(row)
        for cache in self._caches:
            cache.open()

    def promote(self, row: RowId) -> None:
        rows, index = self._prefilling, self._prefilling.index(row)
        rows[0], rows[index] = rows[index], rows[0]
        self._decoding.append(rows.pop(0))
        for cache in self._caches:
            cache.promote(index)

    def drop(self, rows: Sequence[RowId]) -> None:
        self._keep(
            [row for row in self._decoding if row not in rows],
            [row for row in self._prefilling if row not in rows],
        )

    def begin(self, rows: Sequence[RowId], recorded: Ints | None = None) -> None:
        """Set the next pass: one prefilling row, or all decoding rows in order. recorded: (n,) own
        tokens of each row in a pass with drafts, before `verified`."""
        if not self._caches:
            return
        prefilling = None
        if rows[0] in self._prefilling:
            assert len(rows) == 1, "recurrent rows prefill one at a time"
            prefilling = self._prefilling.index(rows[0])
        elif self._decoding != list(rows):
            assert len(rows) == len(self._decoding), "all decoding rows step together"
            self._keep(rows, self._prefilling)
        for cache in self._caches:
            cache.begin(prefilling)
            if recorded is not None:
                cache.record(recorded if self._pads and (recorded != recorded[0]).any() else None)

    def finish(self) -> None:
        for cache in self._caches:
            cache.finish()

    # -- drafts ----------------------------------------------------------------------------------

    def decoded(self) -> None:
        self._verified.append(None)

    def verified(
        self, lengths: Ints, counts: Ints, width: int, adapters: RowAdapters | None = None
    ) -> None:
        """A step verified counts[i] tokens of each decoding row, in a recorded pass of `width`.
        lengths: (n,) before."""
        if self._caches:
            layers = [cache.recorded() for cache in self._caches]
            taken_in = counts if self._pads else np.full_like(counts, width)
            recording = Recording(len(lengths), width, adapters)
            self._verified.append(
                VerifiedPass(list(self._decoding), lengths, taken_in, layers, recording)
            )

    def keep_tokens(self, kept: Ints) -> None:
        """Set the states to those after kept[i] tokens of the last verified pass, and wait. Rows
        that keep all are unchanged."""
        if not self._caches:
            return
        passed = self._verified[-1]
        assert passed is not None, "no pass was verified"
        passed.kept = kept
        rows = np.flatnonzero(kept != passed.taken_in).astype(np.int32)
        if not len(rows):
            return
        for picked in passed.recording.picked(rows, kept[rows], self._partition(passed)):
            for cache, layer in zip(self._caches, passed.layers, strict=True):
                cache.put(picked.rows, layer.after(picked))
        mx.eval(self.state())

    def _partition(self, passed: VerifiedPass) -> Partition:
        # How rows share repeated passes. Padding is tried once.
        if self._pads is None:
            self._pads = keeps_padding_out(passed.layers, passed.recording)
        return self._groups if self._pads else each_alone

    def _keep(self, decoding: Sequence[RowId], prefilling: Sequence[RowId]) -> None:
        indices = (
            [self._decoding.index(row) for row in decoding],
            [self._prefilling.index(row) for row in prefilling],
        )
        for cache in self._caches:
            cache.keep(*indices)
        self._decoding, self._prefilling = list(decoding), list(prefilling)
        if not decoding:
            self._verified.clear()

    def snapshot_at(self, row: RowId, length: int) -> list[mx.array]:
        """A decoding row's states (1, ...) after `length` tokens, within the last `STEPS_BACK`
        steps, of which one kept drafts."""
        found = (
            passed.after(row, length) for passed in reversed(self._verified) if passed is not None
        )
        states = next((states for states in found if states is not None), None)
        assert states is not None, "a snapshot is of now, or of the last steps with drafts"
        return states

    def snapshot(self, row: RowId) -> list[mx.array]:
        return [part for cache in self._caches for part in cache.snapshot(self._index(row))]

    def restore(self, row: RowId, parts: Sequence[Sequence[mx.array]]) -> None:
        """Set a prefilling row's states to a snapshot, by layer."""
        for cache, parts_of_cache in zip(self._caches, parts, strict=True):
            cache.restore(self._index(row), parts_of_cache)

    def _index(self, row: RowId) -> int:
        if row in self._decoding:
            return self._decoding.index(row)
        return len(self._decoding) + self._prefilling.index(row)

    def state(self) -> list[mx.array]:
        return [state for cache in self._caches for state in cache.state()]

    @property
    def nbytes(self) -> int:
        """Also of those before the last passes with drafts."""
        states = sum(state.nbytes for state in self.state())
        return states + sum(passed.nbytes for passed in self._verified if passed is not None)
