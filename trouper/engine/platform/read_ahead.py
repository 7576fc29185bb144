"""Policy: read a step's tokens during the next step, or before its start."""

from __future__ import annotations

from collections.abc import Callable

import attrs

WAITS = 0.05
"""Fraction of a step. After longer waits the device is the bottleneck."""
LARGE_KV = 2**30
"""Bytes of KV from which tokens are read first: a step that starts earlier copies buffers."""
SURE = 8
"""Consecutive steps without a wait before early reading is tried."""
PAUSE_STEPS = 200
"""Further steps before the next try, after an early read that waited."""


@attrs.define
class ReadAhead:
    """Decides whether tokens are read before the next step's start.

    Starting a step frees the GIL, for the server's thread to handle tokens that are ready; waiting
    for others would idle the device.
    """

    early: bool = False
    _easy: int = 0

    def reads_early(self, kv_bytes: Callable[[], int]) -> bool:
        """`kv_bytes` visits every buffer and is called only if needed."""
        return self.early or kv_bytes() > LARGE_KV

    def record(self, waited_s: float, step_s: float) -> None:
        """Record a read: wait and step time in seconds."""
        if waited_s <= WAITS * step_s:
            self._easy += 1
            self.early = self.early or self._easy >= SURE
        else:
            self._easy = -PAUSE_STEPS if self.early else 0
            self.early = False
