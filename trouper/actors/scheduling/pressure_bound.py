"""The bound on rows and cached blocks that follows from the system's memory pressure. Pure.

The device's own limit says nothing of other programs. Where the kernel says that memory is short,
rows and cached blocks get less than they have: a tenth less at each look of the janitor, or a third
where it is critical. Blocks are evicted for that first, then rows are preempted (`kv_memory`). When
the pressure ends the bound grows slowly, and ends where it no longer binds.

Swap counts by its growth alone: a Mac keeps what it once swapped, so most of a swap file in use is
no sign that memory is short now.
"""

from __future__ import annotations

from typing import Final

import attrs

from trouper.protocol.health import MemoryPressure
from trouper.protocol.model import MemoryStats

KEEPS: Final[dict[MemoryPressure, float]] = {"warning": 0.9, "critical": 0.67}
"""Part of the bytes in use that stays."""
GROWS: Final = 1.25
FLOOR: Final = 1024
"""The bound is never less than this part of the device's limit, as its denominator: it gains
nothing below, and returns from there within minutes."""
SWAP_GROWTH: Final = 0.005
"""Growth of swap between two looks, as a part of the device's limit, that counts as a warning."""


@attrs.define
class PressureBound:
    bound_bytes: int = 0
    """Bound on rows and cached blocks; 0: there is none."""
    _swapped_bytes: int | None = None

    def look(self, stats: MemoryStats, used_bytes: int) -> MemoryPressure:
        """Update the bound. `used_bytes`: of rows and cached blocks. Returns the pressure that was
        found."""
        pressure = self._pressure(stats)
        if (part := KEEPS.get(pressure)) is not None:
            bound = int(min(used_bytes, self.bound_bytes or used_bytes) * part)
            self.bound_bytes = max(1, stats.limit_bytes // FLOOR, bound)
        elif self.bound_bytes:
            grown = int(self.bound_bytes * GROWS) + 1
            self.bound_bytes = grown if grown < stats.limit_bytes else 0
        return pressure

    def _pressure(self, stats: MemoryStats) -> MemoryPressure:
        before, self._swapped_bytes = self._swapped_bytes, stats.swapped_bytes
        grew = before is not None and stats.swapped_bytes - before > stats.limit_bytes * SWAP_GROWTH
        return "warning" if grew and stats.pressure not in KEEPS else stats.pressure
