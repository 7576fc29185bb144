"""Receives a body only as the reader has room; Quart receives as fast as the client sends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any

import trio
from quart_trio.wrappers.request import TrioBody

from trouper.protocol.problems import RequestFailed

READ_AHEAD = 2**16
"""Bytes received before any read, and one message more."""
DROP_S = 0.5
Take = Callable[[int], None]
"""Called with a number of bytes before storing. Raises `RequestFailed`."""


class PacedBody(TrioBody):
    def __init__(self, expected_content_length: int | None, max_content_length: int | None) -> None:
        super().__init__(expected_content_length, max_content_length)
        self._room, self._ended = trio.Event(), trio.Event()
        self._unread = 0
        self._max_unread: float = READ_AHEAD
        self._take: Take | None = None
        self._failure: RequestFailed | None = None
        self.received = 0
        self._drops = False
        self._dropped = 0

    def paced(self, receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        """Return a `receive` that waits for room."""

        async def wait_and_receive() -> Any:
            while self._unread > self._max_unread:
                await self._room.wait()
            return await receive()

        return wait_and_receive

    def admit(self, max_unread: float, take: Take | None = None) -> None:
        """Let `max_unread` bytes wait for the reader. `take` gets each number of bytes; the reader
        gets the exception."""
        if take is not None:
            take(self._unread)
        self._max_unread, self._take = max_unread, take
        self.make_room()

    async def drop(self, timeout_s: float) -> None:
        """Receive and drop the rest of a refused body, for a while."""
        self.discard()
        before = -1
        with trio.move_on_after(timeout_s):
            while before < self._dropped and not self._ended.is_set():
                before = self._dropped
                with trio.move_on_after(DROP_S):
                    await self._ended.wait()

    def discard(self) -> None:
        """Drop what was and will be received."""
        self._drops = True
        self.clear()
        self.make_room()

    def append(self, data: bytes) -> None:
        if self._drops:
            self._dropped += len(data)
            return
        self.received += len(data)
        if self._ended.is_set():  # The body is too large, or was refused.
            return
        if self._take is not None:
            try:
                self._take(len(data))
            except RequestFailed as failed:
                self._failure = failed
                self.clear()
                self.set_complete()
                return
        self._unread += len(data)
        super().append(data)

    def set_complete(self) -> None:
        self._ended.set()
        super().set_complete()

    def clear(self) -> None:
        self._unread = 0
        super().clear()

    async def __anext__(self) -> bytes:
        self._raise_failure()
        data = await super().__anext__()
        self._unread -= len(data)
        return data

    def __await__(self) -> Generator[Any, None, Any]:
        self._raise_failure()
        data = yield from super().__await__()
        self._raise_failure()
        return data

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def make_room(self) -> None:
        self._room.set()
        self._room = trio.Event()
