"""Weights that the device keeps resident, since paging is slow.

Only weights are wired: wired memory is neither compressed nor swapped, and too much takes a machine
down (mlx #3186).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import attrs
import mlx.core as mx

from trouper.engine.platform import device
from trouper.protocol.settings import Settings

log = logging.getLogger("trouper.engine")
WIRED_PART: Final = 0.9
"""Of the recommended working set; rows, blocks and activations need the rest."""


@attrs.define(eq=False)
class WiredMemory:
    """The wired limit of this process. `recommended`: bytes; 0: nothing is ever wired."""

    set_limit: Callable[[int], object]
    recommended: Callable[[], int]
    _held: dict[int, int] = attrs.field(factory=dict)
    """Bytes of weights by holder."""
    _ceiling: int = 0
    limit_bytes: int = 0

    def hold(self, holder: object, nbytes: int, sharers: int = 1) -> None:
        """Wire `nbytes` of loaded weights. `sharers`: processes on the device."""
        self._ceiling = int(self.recommended() * WIRED_PART) // sharers
        self._held[id(holder)] = nbytes
        self._apply()

    def release(self, holder: object) -> None:
        if self._held.pop(id(holder), None) is not None:
            self._apply()

    def _apply(self) -> None:
        limit = min(sum(self._held.values()), self._ceiling)
        if limit == self.limit_bytes:
            return
        try:
            self.set_limit(limit)
        except (
            ValueError,
            RuntimeError,
        ) as error:
            # A system that does not wire, or a limit that was lowered meanwhile.
            log.warning("weights are not wired: %s", error)
            return
        self.limit_bytes = limit


WIRED = WiredMemory(mx.set_wired_limit, device.working_set_bytes)


def bound_memory(holder: object, settings: Settings, weights_bytes: int, sharers: int) -> None:
    """Wire a loaded model's weights, and bound the allocator's spare buffers."""
    device.bound_spare_buffers(settings.buffer_cache)
    if not settings.no_wired_weights:
        WIRED.hold(holder, weights_bytes, sharers)
