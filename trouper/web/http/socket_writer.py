"""Writes to the socket of one connection: in its task, with a time limit, or at once from another
task."""

from __future__ import annotations

import os
from collections.abc import Callable

import trio

MAX_WRITE = 2**16


class SocketWriter:
    """The sending side of a connection.

    The body of a response is mostly a stream of small chunks, one for each token of each stream. To
    send one in the connection's own task takes a task switch, two cancel scopes and four layers of
    events. `write_now` sends it from whichever task has it, as far as the socket takes it; only
    what the socket does not take is left for the connection's task, which waits for the client.
    """

    def __init__(
        self, stream: trio.SocketStream, timeout_s: float, cut: Callable[[], None]
    ) -> None:
        """`timeout_s`: of each write that waits; a slow reader of a long answer does read. `cut`:
        ends the connection, because its client has disconnected, reads nothing, or has received a
        part of something."""
        self._stream, self._timeout_s, self.cut = stream, timeout_s, cut
        self.more_follows = False
        """Set by the app, which will send two parts of a response without a pause between them,
        before the first one: then both are one write."""
        self._lock = trio.Lock()

    def write_now(self, chunk: bytes) -> bytes:
        """Send a chunk of a chunked body (RFC 9112, 7.1), and return what the socket did not take
        of it: all, if another write is in progress, or if the client has disconnected, which the
        next `write` finds."""
        framed = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        return framed if self._lock.locked() else framed[self._taken(framed) :]

    async def write(self, data: bytes) -> None:
        """Send all of the data, or end the connection: the peer has disconnected or reads nothing,
        and only cancelling everything ends what waits for it. Mostly the socket takes all at once:
        then other tasks run once, and not at the lock, at a time limit and at Trio's own write."""
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()
        try:
            for start in range(self._taken(data), len(data), MAX_WRITE):
                if not await self._write_bit(memoryview(data)[start : start + MAX_WRITE]):
                    self.cut()
                    return
        finally:
            self._lock.release()
        await trio.lowlevel.checkpoint()

    def _taken(self, data: bytes) -> int:
        """Number of bytes that the socket takes at once."""
        try:
            return os.write(self._stream.socket.fileno(), data)
        except OSError:  # BlockingIOError is one: the socket's buffer is full.
            return 0

    async def _write_bit(self, data: memoryview) -> bool:
        with trio.move_on_after(self._timeout_s):
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return False
            except trio.Cancelled:
                self.cut()  # A part of the data may have been sent.
                raise
            else:
                return True
        return False
