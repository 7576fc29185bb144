"""Server-sent events, logs of events that can be read later, from any position, and bodies that
own nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

import msgspec
import trio
from quart.wrappers.response import ResponseBody

from trouper.web.streaming.step_delivery import MAX_EVENTS


class PassiveBody(ResponseBody):
    """A response body without resources: closing the body ends only the reading."""

    async def __aenter__(self) -> AsyncIterator[bytes]:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    @abstractmethod
    async def __anext__(self) -> bytes:
        """Return the next write."""


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
        """Wait until there are more than `position` events, or the log is closed."""
        await trio.lowlevel.checkpoint()
        while len(self._events) <= position and not self.over:
            await self._readers.park()


class Replay(PassiveBody):
    def __init__(
        self,
        log: EventLog,
        position: int,
        heartbeat_s: float,
        heartbeat: Callable[[int], bytes],
        *,
        before_end: Callable[[], Awaitable[None]],
    ) -> None:
        """`heartbeat` formats a heartbeat behind the event of that number, which may be -1.
        `before_end` is awaited before the last events are sent."""
        self._log, self._position, self._before_end = log, position, before_end
        self._heartbeat_s, self._heartbeat = heartbeat_s, heartbeat

    async def __anext__(self) -> bytes:
        """Return up to `MAX_EVENTS` available events as one write."""
        with trio.move_on_after(self._heartbeat_s):
            await self._log.wait_beyond(self._position)
            events = self._log.since(self._position, MAX_EVENTS)
            if not events:
                raise StopAsyncIteration
            if self._log.over:
                await self._before_end()
            self._position += len(events)
            return b"".join(events)
        return self._heartbeat(self._position - 1)
