"""The channel of plans to an engine. An engine's thread gets plans in the sender's task, without a
task switch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

import attrs
import trio

from trouper.protocol.plans import Plan


class ClosesAtEnd(ABC):
    __slots__ = ()

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@attrs.define(eq=False)
class PlanReceiver(ClosesAtEnd):
    """The engine's end: iterates over plans, or passes each to `put`."""

    _channel: trio.MemoryReceiveChannel[Plan]
    put: Callable[[Plan], None] | None = attrs.field(default=None, init=False)

    def __aiter__(self) -> AsyncIterator[Plan]:
        return self._channel

    async def put_by(self, put: Callable[[Plan], None]) -> None:
        """Call `put`, which neither blocks nor raises, with waiting plans, then with each plan in
        the sender's task. Returns at the end of plans."""
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
    """The end of the scheduler or the mirror."""

    _channel: trio.MemorySendChannel[Plan]
    _receiver: PlanReceiver

    def send_nowait(self, plan: Plan) -> None:
        """Raises `trio.WouldBlock` if too many plans wait, `trio.BrokenResourceError` without a
        receiver."""
        if self._receiver.put is None:
            self._channel.send_nowait(plan)
        else:
            self._receiver.put(plan)

    async def send(self, plan: Plan) -> None:
        """Wait for room. Raises `trio.BrokenResourceError` without a receiver."""
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
    receiver = PlanReceiver(receiving)
    return PlanSender(sending, receiver), receiver
