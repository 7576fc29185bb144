"""Server-sent events, and logs of events that can be read later, from any position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import trio

from trouper.web.streaming.passive_body import PassiveBody
from trouper.web.streaming.step_delivery import MAX_EVENTS


def named_event(name: str, data: Any) -> bytes:
    """Format a server-sent event with a name. `data` becomes JSON."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


class EventLog:
    """An append-only list of events, until closed. Any number of readers follow."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._readers = trio.lowlevel.ParkingLot()
        self.over = False
        self.size = 0

    def add(self, event: bytes) -> None:
        self._events.append(event)
        self.size += len(event)
        self._readers.unpark_all()

    def close(self) -> None:
        self.over = True
        self._readers.unpark_all()

    def since(self, position: int, limit: int) -> list[bytes]:
        return self._events[position : position + limit]

    async def wait_beyond(self, position: int) -> None:
        """Wait until there are more than `position` events, or the log is closed."""
        await trio.lowlevel.checkpoint()
        while len(self._events) <= position and not self.over:
            await self._readers.park()


class Replay(PassiveBody):
    def __init__(
        self, log: EventLog, position: int, heartbeat_s: float, heartbeat: Callable[[int], bytes]
    ) -> None:
        """`heartbeat` formats a heartbeat behind the event of that number, which may be -1."""
        self._log, self._position = log, position
        self._heartbeat_s, self._heartbeat = heartbeat_s, heartbeat

    async def __anext__(self) -> bytes:
        """Return up to `MAX_EVENTS` available events as one write."""
        with trio.move_on_after(self._heartbeat_s):
            await self._log.wait_beyond(self._position)
            events = self._log.since(self._position, MAX_EVENTS)
            if not events:
                raise StopAsyncIteration
            self._position += len(events)
            return b"".join(events)
        return self._heartbeat(self._position - 1)
