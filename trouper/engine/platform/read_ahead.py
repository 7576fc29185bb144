"""When the tokens of a step are read: while the next one runs, or before it is started."""

from __future__ import annotations

import attrs

WAITS = 0.05
"""Of a step's time: who waits longer for tokens waits for the device."""
SURE = 8
"""Steps in a row."""
PAUSE_STEPS = 200
"""Steps, after a try that waited."""


@attrs.define
class ReadAhead:
    """Whether the device keeps the engine's thread waiting, or the thread the device.

    Starting a step takes as long as it takes to hand some thousand operations to the device, and the interpreter's lock is
    free meanwhile. Where the device is done sooner than the next step is built (seen on an H200: 16 ms of starting after 4
    of building, and never a wait) the tokens before are there by then, and telling them first lets the server's thread work
    while the lock is free: else it would while the next step is built. Where the device takes longer, asking first would
    leave it without work.
    """

    early: bool = False
    """Before the next step is started."""
    _easy: int = 0

    def took(self, waited_s: float, step_s: float) -> None:
        """Reading a step's tokens took so long, of the step's own time."""
        if waited_s <= WAITS * step_s:
            self._easy += 1
            self.early = self.early or self._easy >= SURE
        else:
            self._easy = -PAUSE_STEPS if self.early else 0
            self.early = False
