"""Events that are kept, so that somebody may read them later, or again, or from the middle."""

from __future__ import annotations

import trio

from trouper.web.output.dialect import COMMENT
from trouper.web.streaming.passive_body import PassiveBody
from trouper.web.streaming.response_streams import MAX_EVENTS


class EventLog:
    """Grows until it is over. Any number of readers, each at its own place."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._readers = trio.lowlevel.ParkingLot()
        self.over = False
        self.size = 0
        """Bytes."""

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
        """Until there are more than so many events, or there will be no more."""
        await trio.lowlevel.checkpoint()
        while len(self._events) <= position and not self.over:
            await self._readers.park()


class Replay(PassiveBody):
    """The body of a streamed response that others write."""

    def __init__(self, log: EventLog, position: int, heartbeat_s: float) -> None:
        self._log, self._position, self._heartbeat_s = log, position, heartbeat_s

    async def __anext__(self) -> bytes:
        """One write: what is there, but not all of a long answer."""
        with trio.move_on_after(self._heartbeat_s):
            await self._log.wait_beyond(self._position)
            events = self._log.since(self._position, MAX_EVENTS)
            if not events:
                raise StopAsyncIteration
            self._position += len(events)
            return b"".join(events)
        return COMMENT
