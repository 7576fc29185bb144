"""Server-sent events with a name, and logs of events that can be read later, from any position."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
import trio

from trouper.web.streaming.step_delivery import MAX_EVENTS


def named_event(name: str, data: Any) -> bytes:
    """Format a server-sent event with a name. `data` becomes JSON."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


class EventLog:
    """An append-only list of events, until closed. Any number of readers follow."""

    def __init__(self, events: Sequence[bytes] | None = None) -> None:
        """`events`: those of a log that is closed."""
        self._events: list[bytes] = [*(events or ())]
        self._readers = trio.lowlevel.ParkingLot()
        self.over = events is not None
        self.size = sum(map(len, self._events))

    def add(self, event: bytes) -> None:
        self._events.append(event)
        self.size += len(event)
        self._readers.unpark_all()

    def close(self) -> None:
        self.over = True
        self._readers.unpark_all()

    def since(self, position: int, limit: int | None) -> list[bytes]:
        return self._events[position : None if limit is None else position + limit]

    async def wait_beyond(self, position: int) -> None:
        await trio.lowlevel.checkpoint()
        while len(self._events) <= position and not self.over:
            await self._readers.park()


async def replayed(
    log: EventLog,
    position: int,
    heartbeat_s: float,
    heartbeat: Callable[[int], bytes],
    *,
    before_end: Callable[[], Awaitable[None]],
) -> AsyncIterator[bytes]:
    """Yield up to `MAX_EVENTS` available events as one write. `heartbeat` formats a heartbeat
    behind the event of that number, which may be -1. `before_end` is awaited before the last events
    are sent."""
    while True:
        events = None
        with trio.move_on_after(heartbeat_s):
            await log.wait_beyond(position)
            found = log.since(position, MAX_EVENTS)
            if found and log.over:
                await before_end()
            events = found
        if events is None:
            yield heartbeat(position - 1)
        elif not events:
            return
        else:
            position += len(events)
            yield b"".join(events)
