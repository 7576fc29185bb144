"""Shapes of a bank's buffers, computed anew only after a cache has other buffers."""

# Each decode pass needs the shapes, and asking 28 layers was two fifths of a one-row step's Python.
# Passes write arrays of the same shapes: only setting `SlotCache.buffers` counts as a change.

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trouper.engine.kv.slot_cache import NO_ROOM, Room, ShapeChanges, SlotCache


@attrs.frozen(cache_hash=True)
class HeldShapes:
    """Shapes of a bank's buffers. Hashed once, as part of a key of each step."""

    shapes: tuple[tuple[int, ...], ...]
    room: Room = attrs.field(eq=False)
    """The minimum over all caches."""

    def has_room(self, slots: int, tokens: int) -> bool:
        return slots <= self.room[0] and tokens <= self.room[1]


class BankCaches:
    """The caches of a bank for one model, and their shapes."""

    def __init__(self, leaves: Sequence[SlotCache], changes: ShapeChanges) -> None:
        """`changes`: the shared count of these caches."""
        self.leaves, self._changes = leaves, changes
        self._seen = -1
        self._held = HeldShapes((), NO_ROOM)

    def held(self) -> HeldShapes:
        if self._seen != self._changes.count:
            shapes = tuple(tuple(buffer.shape) for leaf in self.leaves for buffer in leaf.buffers)
            slots, tokens = (
                zip(*(leaf.room for leaf in self.leaves), strict=True)
                if self.leaves
                else ((0,), (0,))
            )
            self._held, self._seen = (
                HeldShapes(shapes, (min(slots), min(tokens))),
                self._changes.count,
            )
        return self._held
