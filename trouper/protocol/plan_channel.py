"""The channel of plans to an engine. An engine with a thread of its own gets each plan in the sender's task, so that no task has to be
switched to first: a step would begin later, and each switch takes Python's lock from that thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import attrs
import trio

from trouper.protocol.plans import Plan


@attrs.define
class _Taker:
    put: Callable[[Plan], None] | None = None


@attrs.frozen(eq=False)
class PlanSender:
    """The end of the scheduler, or of the mirror."""

    _channel: trio.MemorySendChannel[Plan]
    _taker: _Taker

    def send_nowait(self, plan: Plan) -> None:
        """Raises `trio.WouldBlock` if too many plans wait, `trio.BrokenResourceError` if nobody receives."""
        if self._taker.put is None:
            self._channel.send_nowait(plan)
        else:
            self._taker.put(plan)

    async def send(self, plan: Plan) -> None:
        """Wait until the plan has room. Raises `trio.BrokenResourceError` if nobody receives."""
        if self._taker.put is None:
            await self._channel.send(plan)
        else:
            await trio.lowlevel.checkpoint()
            self._taker.put(plan)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@attrs.frozen(eq=False)
class PlanReceiver:
    """The engine's end: it iterates over the plans, or has them put elsewhere until they end."""

    _channel: trio.MemoryReceiveChannel[Plan]
    _taker: _Taker

    def __aiter__(self) -> AsyncIterator[Plan]:
        return self._channel

    @contextmanager
    def put_by(self, put: Callable[[Plan], None]) -> Iterator[None]:
        """Call `put`, which neither blocks nor raises, with those that wait already, and then with each plan as it is sent, in the sender's
        task. Iterating meanwhile waits for the end of the plans."""
        while True:
            try:
                put(self._channel.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel):
                break
        self._taker.put = put
        try:
            yield
        finally:
            self._taker.put = None

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plan_channel(
    sending: trio.MemorySendChannel[Plan], receiving: trio.MemoryReceiveChannel[Plan]
) -> tuple[PlanSender, PlanReceiver]:
    """Return both ends around those of a memory channel."""
    taker = _Taker()
    return PlanSender(sending, taker), PlanReceiver(receiving, taker)
