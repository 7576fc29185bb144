"""The hourly write budget (--ssd-write-budget), which limits the wear of the disk."""

from __future__ import annotations

import attrs

HOUR_S = 3600.0


@attrs.define
class WriteBudget:
    """Bytes that may be written in each hour. `now` is a monotonic time in seconds."""

    bytes_per_hour: int
    _hour_began: float
    _written_bytes: int = 0
    """Bytes written since then."""

    def allows(self, nbytes: int, now: float) -> bool:
        """Whether a write fits into the budget of the current hour."""
        if now - self._hour_began >= HOUR_S:
            self._hour_began, self._written_bytes = now, 0
        return self._written_bytes + nbytes <= self.bytes_per_hour

    def spend(self, nbytes: int) -> None:
        self._written_bytes += nbytes
