"""The channel of plans to an engine. An engine with a thread of its own gets each plan in the
sender's task, so that no task has to be switched to first: a step would begin later, and each
switch takes Python's lock from that thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import attrs
import trio

from trouper.protocol.closing import ClosesAtEnd
from trouper.protocol.plans import Plan


@attrs.define(eq=False)
class PlanReceiver(ClosesAtEnd):
    """The engine's end: it iterates over the plans, or has them put elsewhere until they end."""

    _channel: trio.MemoryReceiveChannel[Plan]
    put: Callable[[Plan], None] | None = attrs.field(default=None, init=False)
    """What takes a plan instead of the channel, if anything does."""

    def __aiter__(self) -> AsyncIterator[Plan]:
        return self._channel

    async def put_by(self, put: Callable[[Plan], None]) -> None:
        """Call `put`, which neither blocks nor raises, with the plans that wait already, and then
        with each plan as it is sent, in the sender's task. Returns when they have ended."""
        with suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                put(self._channel.receive_nowait())
        self.put = put
        try:
            with suppress(trio.EndOfChannel):
                await self._channel.receive()
        finally:
            self.put = None

    def close(self) -> None:
        self._channel.close()


@attrs.frozen(eq=False)
class PlanSender(ClosesAtEnd):
    """The end of the scheduler, or of the mirror."""

    _channel: trio.MemorySendChannel[Plan]
    _receiver: PlanReceiver

    def send_nowait(self, plan: Plan) -> None:
        """Raises `trio.WouldBlock` if too many plans wait, `trio.BrokenResourceError` if nobody
        receives."""
        if self._receiver.put is None:
            self._channel.send_nowait(plan)
        else:
            self._receiver.put(plan)

    async def send(self, plan: Plan) -> None:
        """Wait until the plan has room. Raises `trio.BrokenResourceError` if nobody receives."""
        if self._receiver.put is None:
            await self._channel.send(plan)
        else:
            await trio.lowlevel.checkpoint()
            self.send_nowait(plan)

    def close(self) -> None:
        self._channel.close()


def plan_channel(
    sending: trio.MemorySendChannel[Plan], receiving: trio.MemoryReceiveChannel[Plan]
) -> tuple[PlanSender, PlanReceiver]:
    """Return both ends around those of a memory channel."""
    receiver = PlanReceiver(receiving)
    return PlanSender(sending, receiver), receiver
