"""The hourly write budget (--ssd-write-budget), against wear."""

from __future__ import annotations

import attrs

HOUR_S = 3600.0


@attrs.define
class WriteBudget:
    """`now` is a monotonic time in seconds."""

    bytes_per_hour: int
    _hour_began: float
    # Bytes in the current hour.
    _written_bytes: int = 0

    def allows(self, nbytes: int, now: float) -> bool:
        if now - self._hour_began >= HOUR_S:
            self._hour_began, self._written_bytes = now, 0
        return self._written_bytes + nbytes <= self.bytes_per_hour

    def spend(self, nbytes: int) -> None:
        self._written_bytes += nbytes
