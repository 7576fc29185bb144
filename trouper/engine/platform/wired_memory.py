"""Weights that the device keeps resident.

A model whose weights are not wired is paged in and out by the system where memory is short: one of
0.7 tokens a second had 31.5 when it was wired. To wire everything took the machine down (mlx
#3186): rows and cached blocks grow, and what is wired can be neither compressed nor swapped. So the
limit is the bytes of weights, summed over the models of this process, and always below what the
device recommends; ranks on one machine divide that. Each model gives its part back when it is
unloaded.
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
"""Part of the recommended working set that weights may fill: rows, blocks and activations need the
rest."""


@attrs.define(eq=False)
class WiredMemory:
    """The wired limit of this process. `set_limit` takes bytes; `recommended` is the device's
    working set, 0 if nothing is ever wired."""

    set_limit: Callable[[int], object]
    recommended: Callable[[], int]
    _held: dict[int, int] = attrs.field(factory=dict)
    """Bytes of weights by who holds them."""
    _ceiling: int = 0
    limit_bytes: int = 0
    """The limit at present."""

    def hold(self, holder: object, nbytes: int, sharers: int = 1) -> None:
        """Wire `nbytes` of weights, which are in memory already: later buffers are wired only while
        there is room below the limit. `sharers`: processes that share the device."""
        self._ceiling = int(self.recommended() * WIRED_PART) // sharers
        self._held[id(holder)] = nbytes
        self._apply()

    def release(self, holder: object) -> None:
        """Give back what `holder` has wired, if it has."""
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
    """Wire the weights of a model that has been loaded, and bound the buffers that the allocator
    keeps, as the settings say."""
    device.bound_spare_buffers(settings.buffer_cache)
    if not settings.no_wired_weights:
        WIRED.hold(holder, weights_bytes, sharers)
