"""Writes to a connection's socket: in the connection's task with a time limit, or at once from any
task."""

from __future__ import annotations

import os
from collections.abc import Callable

import trio

MAX_WRITE = 2**16


class SocketWriter:
    def __init__(
        self, stream: trio.SocketStream, timeout_s: float, cut: Callable[[], None]
    ) -> None:
        """`timeout_s` bounds each waiting write. `cut` ends the connection."""
        self._stream, self._timeout_s, self.cut = stream, timeout_s, cut
        self._lock = trio.Lock()

    def write_now(self, chunk: bytes) -> bytes:
        """Send a chunk of a chunked body (RFC 9112, 7.1), and return the unsent bytes: all during
        another write or after a disconnect."""
        # Through the connection's task a chunk would cost a task switch, two cancel scopes and four
        # layers of events.
        framed = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        return framed if self._lock.locked() else framed[self._taken(framed) :]

    async def write(self, data: bytes) -> None:
        """Send all data, or end the connection if the client reads nothing."""
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
