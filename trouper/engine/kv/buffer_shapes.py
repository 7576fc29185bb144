"""Shapes of a bank's buffers, which a decode pass asks for in each step: computed anew only after a
cache has got other buffers.

To ask each of 28 layers for its shapes and its room was two fifths of the Python of a step of one
row, 2,300 of 5,900 bytecodes. A pass writes into its buffers and so has new arrays, but of the same
shapes: `SlotCache.buffers` is set only where shapes may change, and counts that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from trouper.engine.kv.slot_cache import SlotCache

Room = tuple[int, int]
"""Number of slots, and of tokens in each, that buffers have room for."""
NO_ROOM: Room = (0, 0)


class ShapeChanges:
    """How often caches got other buffers. Those of a bank share one count."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


@attrs.frozen(cache_hash=True)
class HeldShapes:
    """Shapes of the buffers of a bank's caches. Hashed once: they are a part of a key that each
    step looks for."""

    shapes: tuple[tuple[int, ...], ...]
    room: Room = attrs.field(eq=False)
    """The smallest number of slots, and of tokens, that the buffers of any cache have room for."""

    def has_room(self, slots: int, tokens: int) -> bool:
        """Whether all buffers hold `slots` slots of `tokens` tokens."""
        return slots <= self.room[0] and tokens <= self.room[1]


class BankCaches:
    """The caches of a bank for one model, and the shapes of their buffers."""

    def __init__(self, leaves: Sequence[SlotCache], changes: ShapeChanges) -> None:
        """`changes`: the count that these caches share."""
        self.leaves, self._changes = leaves, changes
        self._seen = -1
        self._held = HeldShapes((), NO_ROOM)

    def held(self) -> HeldShapes:
        """The shapes that the buffers have now."""
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
