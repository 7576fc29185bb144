"""Delivery by the step: one task writes the text of a step to all streams."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context

import trio

from trouper.actors.runtime.answer import Answer
from trouper.protocol.replies import Delta, joined
from trouper.web.http.socket_writer import SocketWriter

# Maximum number of deltas or events in one write: a client that pauses gets small pieces.
MAX_EVENTS = 256
STREAMS_AT_ONCE = 64  # Number of streams after which other tasks run, the scheduler among them.


# The first reply of a step wakes the task, which runs when the scheduler has sent its next plan: by
# then all replies are there. A stream's own task sleeps until a deadline, a reply other than text,
# a full socket, or an error.
class StepDelivery:
    """The streams with something to write, and the task that writes."""

    def __init__(self) -> None:
        self.running = 0
        """Number of streams whose text the task writes."""
        self._noted: list[DirectStream] = []
        self._idle = trio.lowlevel.ParkingLot()

    def note(self, stream: DirectStream) -> None:
        """Note that the stream has something to write. Called by senders of replies: neither blocks
        nor raises."""
        self._noted.append(stream)
        if len(self._noted) == 1:  # Else an earlier one has woken the task, or it is about to look.
            self._idle.unpark()

    async def run(self) -> None:
        while True:
            if not self._noted:
                await self._idle.park()
            streams, self._noted = self._noted, []
            for start in range(0, len(streams), STREAMS_AT_ONCE):
                if start:
                    await trio.lowlevel.checkpoint()
                now = trio.current_time()
                for stream in streams[start : start + STREAMS_AT_ONCE]:
                    stream.deliver(now)


class DirectStream:
    """A streamed response whose text StepDelivery writes, while its own task is in `run`."""

    def __init__(
        self,
        answer: Answer,
        text: Callable[[int, Delta, Answer], bytes],
        *,
        writer: SocketWriter,
        delivery: StepDelivery,
        heartbeat_s: float,
    ) -> None:
        """`text`: formats the events of a delta of the answer, the only one; b"": none yet."""
        self._answer, self._text = answer, text
        # The context of the stream's own task: log lines have the id of its request.
        self._context = copy_context()
        self._writer, self._delivery, self._heartbeat_s = writer, delivery, heartbeat_s
        self._follows = False
        self._decodes = False
        self._noted = False
        self._written_at = 0.0
        self._untaken = b""
        """Bytes that the socket did not take of the last write."""
        self._error: Exception | None = None
        self._woken, self._sleep = trio.Event(), trio.CancelScope()

    async def run(self) -> bool:
        """Return when something else than text has to be written, or the answer's time is over.
        False: nothing was written for `heartbeat_s`."""
        self._delivery.running += 1
        try:
            self._begin()
            while not self._woken.is_set():
                heartbeat_at, now = self._written_at + self._heartbeat_s, trio.current_time()
                if now >= min(heartbeat_at, self._answer.deadline):
                    return now < heartbeat_at
                with trio.CancelScope(
                    deadline=min(heartbeat_at, self._answer.deadline)
                ) as self._sleep:
                    await self._woken.wait()
            await self._finish_write()
        except BaseException:
            if self._untaken:  # A client that has a part of a chunk can get nothing after it.
                self._writer.cut()
            raise
        finally:
            self._delivery.running -= 1
            self._answer.follow(None)
            self._follows = False
        return True

    def _begin(self) -> None:
        now = trio.current_time()
        self._woken, self._written_at, self._follows = trio.Event(), now, True
        self._answer.follow(self._note)
        self.deliver(now)  # Text that came before.

    async def _finish_write(self) -> None:
        if self._error is not None:
            raise self._error
        if self._untaken:
            self._answer.history.hold("client")
            await self._writer.write(self._untaken)
            self._untaken = b""
            self._answer.history.release()

    def _note(self) -> None:
        if not self._noted:
            self._noted = True
            self._delivery.note(self)

    def deliver(self, now: float) -> None:
        """Write the text that has arrived. An error is raised in the stream's own task."""
        self._noted = False
        if not self._follows:
            return
        try:
            answer = self._answer
            while not self._untaken and (deltas := answer.take_deltas(MAX_EVENTS, now)):
                if not self._decodes:  # The limit between tokens may end before the first one's.
                    self._decodes = True
                    self._sleep.deadline = min(self._sleep.deadline, answer.deadline)
                delta = deltas[0] if len(deltas) == 1 else joined(deltas)
                if data := self._context.run(self._text, 0, delta, answer):
                    self._untaken = self._writer.write_now(data)
                    self._written_at = now
                    if answer.history.is_held:
                        answer.history.release()
                else:
                    answer.history.hold("parser" if delta.text else "stop_string")
                if len(deltas) < MAX_EVENTS:
                    break
        except Exception as error:  # noqa: BLE001 - raised again by `run`.
            self._error = error
        if self._untaken or self._error is not None or self._answer.has_other:
            self._follows = False
            self._woken.set()
