"""Policy for reading a step's tokens: while the next step runs, or before it is started."""

from __future__ import annotations

from collections.abc import Callable

import attrs

WAITS = 0.05
"""Fraction of a step's time. A longer wait for tokens means that the device is the bottleneck."""
LARGE_KV = 2**30
"""Bytes of KV from which on tokens are read before the next step is started. MLX writes into a
buffer in place only if nothing that still runs reads it; a step that is started earlier copies all
of them. Seen on an H200 with 8.6 GB: 2.7 to 6.5 ms a step, and twice the memory."""
SURE = 8
"""Number of consecutive steps without a wait before early reading is tried."""
PAUSE_STEPS = 200
"""Additional number of steps before the next try, after an early read that waited."""


@attrs.define
class ReadAhead:
    """Decides whether tokens are read before the next step is started, from whether the thread
    waits for the device.

    Starting a step means sending some thousand operations to the device; the GIL is free meanwhile.
    Where the device finishes a step before the next one is built (seen on an H200: 16 ms of
    starting after 4 ms of building, and never a wait), the previous tokens are ready by then, and
    sending them first lets the server's thread work while the GIL is free; else it would work while
    the next step is built. Where the device takes longer, reading first would leave it without
    work.
    """

    early: bool = False
    """Whether tokens are read before the next step is started."""
    _easy: int = 0

    def reads_early(self, kv_bytes: Callable[[], int]) -> bool:
        """Whether tokens are read before the next step is started, over rows that hold
        `kv_bytes()`, which takes a visit to every buffer and is called only if it decides."""
        return self.early or kv_bytes() > LARGE_KV

    def record(self, waited_s: float, step_s: float) -> None:
        """Record a read: the wait for the tokens, and the step's own time."""
        if waited_s <= WAITS * step_s:
            self._easy += 1
            self.early = self.early or self._easy >= SURE
        else:
            self._easy = -PAUSE_STEPS if self.early else 0
            self.early = False
