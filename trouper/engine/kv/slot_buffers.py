"""KV buffers of a model: the slot caches of all its layers, which have the same slots, are made, grown, moved and read alike.

Slots are numbers here. Which row has a slot is known to `slot_assignment.py`, and which tokens a pass runs to `slot_rows.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from trouper.engine.kv.full_slots import FullSlots
from trouper.engine.kv.kv_layout import Layout, dealt, layout_of
from trouper.engine.kv.model_caches import flatten, slot_caches, view
from trouper.engine.kv.pass_shapes import STEP, Shapes
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.kv.recurrent_state import StateSlots
from trouper.engine.kv.region import Ints, Region
from trouper.engine.kv.ring_slots import RingSlots
from trouper.engine.kv.slot_assignment import Moves, Rearrangement
from trouper.engine.kv.slot_cache import SlotCache
from trouper.engine.platform.eager_eval import copied

ALL = slice(None)


class SlotBuffers:
    """The slots of every layer. Recurrent states have no slots but rows in the same order."""

    def __init__(self, model: nn.Module, kv: KvFormat, slack: int, shapes: Shapes) -> None:
        """`slack`: number of tokens that rings hold beyond their window."""
        self._model, self._kv = model, kv
        self._caches = slot_caches(model, kv, slack)
        self.leaves: list[Any] = flatten(self._caches)
        """Cache of each layer, or several of one layer, in the model's order."""
        self._full = [cache for cache in self.leaves if isinstance(cache, FullSlots)]
        self._rings = [cache for cache in self.leaves if isinstance(cache, RingSlots)]
        self.states = [cache for cache in self.leaves if isinstance(cache, StateSlots)]
        for index, cache in enumerate(self._full):
            cache.shapes = shapes
            cache.phase = 0 if shapes.rounded else index * STEP // len(self._full)

    # -- a pass ----------------------------------------------------------------------------------

    def begin(self, region: Region) -> list[Any]:
        """Set the slots of the next pass. Returns the caches that the model gets."""
        for cache in self.leaves:
            cache.begin(region)
        return [view(cache) for cache in self._caches]

    def finish(self) -> None:
        """Drop the views of the pass after its graph is built."""
        for cache in self.leaves:
            cache.finish()

    def state(self) -> list[mx.array]:
        """Return all arrays that passes change."""
        return [state for cache in self.leaves for state in cache.state()]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers and states, used or not."""
        return sum(cache.nbytes for cache in self.leaves)

    # -- rows that enter, decode and leave -------------------------------------------------------

    def hold(self, slots: int) -> None:
        """Make room for `slots` slots."""
        for cache in self.leaves:
            if not isinstance(cache, StateSlots):
                cache.hold(slots)

    def open(self, slot: int) -> None:
        """Add the slot of a prefilling row without KV, behind all others."""
        for cache in self.leaves:
            if isinstance(cache, StateSlots):
                cache.open()
            else:
                cache.hold(slot + 1)

    def promote(self, slot: int, first: int, lengths: Ints) -> None:
        """Exchange the rows of two slots, which hold `lengths[slot]` tokens. The row of `slot` decodes from now on; `first` is the
        first slot of prefilling rows."""
        for cache in self.states:
            cache.promote(slot - first)
        if slot != first:
            self.move([(slot, first), (first, slot)], lengths)

    def rearrange(self, change: Rearrangement, first: int, lengths: Ints) -> None:
        """Move rows to new slots, after some have left. `first`: the first slot of prefilling rows until now."""
        decoding, prefilling = change.arranged[: change.num_decoding], change.arranged[change.num_decoding :]
        for cache in self.states:
            cache.keep(decoding, [slot - first for slot in prefilling])
        self.move(change.moves, lengths)

    def move(self, moves: Moves, lengths: Ints) -> None:
        """Copy rows from slot to slot, all at once. Rows without KV are skipped."""
        moves = [(source, target) for source, target in moves if lengths[source]]
        caches = [cache for cache in self.leaves if isinstance(cache, SlotCache) and cache.buffers]
        copies = iter(
            copied(part for cache in caches for source, _ in moves for part in cache.row(source, int(lengths[source])))
        )
        for cache in caches:
            for _, target in moves:
                cache.put_row(target, [next(copies) for _ in cache.buffers])

    def fit(self, slots: int, tokens: int, *, exactly: bool = False) -> None:
        """Shrink buffers that are much too large for `slots` slots of `tokens` tokens (see `SlotCache.fit`)."""
        for cache in self.leaves:
            if not isinstance(cache, StateSlots):
                cache.fit(slots, tokens, exactly=exactly)

    def clear(self) -> None:
        """Free everything, after the last row has left."""
        for cache in self.leaves:
            cache.clear()

    # -- blocks and snapshots: copied out of a slot, and restored into another -------------------

    @cached_property
    def layout(self) -> Layout:
        """Shapes of the arrays that blocks and snapshots consist of."""
        return layout_of(self._model, self._kv)

    def read(self, slot: int, start: int, stop: int) -> list[mx.array]:
        """(heads, stop - start, dim) views of each buffer that can be cut at a token."""
        return [part for cache in self._full for part in cache.read(slot, start, stop)]

    def write(self, slot: int, start: int, parts: Sequence[mx.array], room: int, leaves: slice = ALL) -> None:
        """Write tokens from `start` on, in the form that `read` returns, into the layers `leaves`; make room for `room` tokens."""
        for cache, parts_of_cache in zip(self._full[leaves], dealt(parts, self.layout.full[leaves]), strict=True):
            if parts_of_cache:
                cache.write(slot, start, parts_of_cache, room)

    @property
    def can_begin_with(self) -> bool:
        """Whether there is only one slot and no buffer yet, so that `begin_with` is allowed."""
        return not any(cache.buffers or cache.slots > 1 for cache in self._full)

    def begin_with(self, parts: Sequence[Sequence[mx.array]], room: int) -> None:
        """Make the buffers from the first tokens of the only slot, given as pieces for each buffer."""
        for cache, parts_of_cache in zip(self._full, dealt(parts, self.layout.full), strict=True):
            cache.begin_with(parts_of_cache, room)

    def start(self, leaves: slice = ALL) -> None:
        """Start evaluating the buffers that were written."""
        mx.async_eval([state for cache in self._full[leaves] for state in cache.state()])

    def snapshot(self, slot: int, length: int) -> list[mx.array]:
        """Copy rings, then states, as they were after `length` tokens. States are only known as they are now."""
        rings = [part for cache in self._rings for part in cache.snapshot(slot, length)]
        return rings + [part for cache in self.states for part in cache.snapshot(slot)]

    def restore_snapshot(self, slot: int, length: int, parts: Sequence[mx.array]) -> None:
        """Write the snapshot of a row of `length` tokens."""
        rings = sum(map(len, self.layout.rings))
        for ring, parts_of_ring in zip(self._rings, dealt(parts[:rings], self.layout.rings), strict=True):
            if parts_of_ring:
                ring.restore(slot, length, parts_of_ring)
        for states, parts_of_states in zip(self.states, dealt(parts[rings:], self.layout.states), strict=True):
            states.restore(slot, parts_of_states)
        mx.async_eval([ring.state() for ring in self._rings], [states.state() for states in self.states])
