"""A request's body, of which little is received until its reader has room for it.

Quart receives a body as fast as the client sends it, also while the request's key is looked at and
when nobody reads it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio
from quart_trio.wrappers.request import TrioBody, TrioRequest

from trouper.protocol.problems import RequestFailed

READ_AHEAD = 2**16
"""Bytes of a body that are received before anybody reads it, and one message more."""
DROP_S = 0.5
Take = Callable[[int], None]
"""Called with a number of bytes before they are kept. Raises `RequestFailed`."""


class PacedBody(TrioBody):
    """A body that is received as its reader says."""

    def __init__(self, expected_content_length: int | None, max_content_length: int | None) -> None:
        super().__init__(expected_content_length, max_content_length)
        self._room = trio.Event()
        self._max_unread: float = READ_AHEAD
        self._take: Take | None = None
        self.received = 0
        """Bytes that have come, but for dropped ones."""
        self._dropped: int | None = None
        """Bytes that were dropped; None: the body is kept."""

    def paced(self, receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        """Return a `receive` that waits until there is room for more."""

        async def wait_and_receive() -> Any:
            while len(self._data) > self._max_unread:
                await self._room.wait()
            return await receive()

        return wait_and_receive

    def admit(self, max_unread: float, take: Take | None = None) -> None:
        """Let so many bytes wait for their reader. `take` is called with the bytes that have come,
        and with further ones; the reader of the body gets what it raises."""
        if take is not None:
            take(len(self._data))
        self._max_unread, self._take = max_unread, take
        self._make_room()

    async def drop(self, timeout_s: float) -> None:
        """Receive and drop what is left of a body that is refused, for a client that still sends
        hears nothing. One that sends nothing for DROP_S waits for its answer."""
        self._dropped, before = len(self._data), -1
        self.clear()
        self._make_room()
        with trio.move_on_after(timeout_s):
            while before < self._dropped and not self._complete.is_set():
                before = self._dropped
                with trio.move_on_after(DROP_S):
                    await self._complete.wait()

    def append(self, data: bytes) -> None:
        if self._dropped is not None:
            self._dropped += len(data)
            return
        self.received += len(data)
        if self._take is not None and self._must_raise is None:
            try:
                self._take(len(data))
            except RequestFailed as failed:
                self._must_raise = failed
                self.clear()
                self.set_complete()
        super().append(data)

    def _make_room(self) -> None:
        self._room.set()
        self._room = trio.Event()


class PacedRequest(TrioRequest):
    body_class = PacedBody
