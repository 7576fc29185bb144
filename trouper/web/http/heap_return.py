"""Returning memory to the system after requests with huge bodies."""

from __future__ import annotations

import trio

from trouper import heap

HUGE_BODY = 2**20
"""Body size in bytes beyond which memory is returned to the system after the request."""
GIVE_BACK_AFTER_S = 0.5
"""Delay between the end of a request with a huge body and returning its memory, so that the body
has been freed; requests that end meanwhile share one call."""


class Heap:
    """Returns memory to the system once for all huge requests that end at about the same time."""

    def __init__(self) -> None:
        self._due = False

    def give_back_soon(self) -> None:
        if not self._due:
            self._due = True
            trio.lowlevel.spawn_system_task(self._give_back)

    async def _give_back(self) -> None:
        await trio.sleep(GIVE_BACK_AFTER_S)
        self._due = False
        await trio.to_thread.run_sync(heap.give_back)
