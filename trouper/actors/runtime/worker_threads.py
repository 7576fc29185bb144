"""Work on threads, in lanes for long and short work."""

from __future__ import annotations

import errno
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import inf
from typing import Literal, TypeVar, TypeVarTuple, Unpack

import attrs
import trio

from trouper.protocol.problems import (
    Problem,
    RequestFailed,
    grammars_full,
    is_shortage,
    queue_full,
)

T = TypeVar("T")
# A file is written in less than a second.
LAST_WORK_S = 2.0


async def run_on_thread(
    work: Callable[[], T],
    limiter: trio.CapacityLimiter | None = None,
    *,
    abandon_on_cancel: bool = True,
    thread_name: str | None = None,
) -> T:
    """Run `work` as `trio.to_thread.run_sync` does. `limiter` None: Trio's own. Raises what `work`
    raises, and `OSError` (EAGAIN) if no thread can be started."""
    try:
        return await trio.to_thread.run_sync(
            work, abandon_on_cancel=abandon_on_cancel, limiter=limiter, thread_name=thread_name
        )
    except RequestFailed as refused:
        problem = refused.problem
        # Trio's frames refer to the exception; its traceback, or that of the error behind it,
        # refers to those frames and to the request's texts: all would stay until garbage is
        # collected.
        for error in (refused, refused.__context__):
            if error is not None:
                error.with_traceback(None)
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        raise OSError(errno.EAGAIN, "the system starts no further thread") from error
    raise RequestFailed(problem)


class DiskThread:
    """SSDWriter's thread: a slow disk takes none from others."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread. Cancellation waits up to LAST_WORK_S, lest a write be left
        halfway, then abandons the thread. Raises what `work` raises, and `OSError` if no thread can
        be started."""
        # A file system that does not answer (NFS, FUSE) cannot be interrupted, and must not keep
        # the process or the model alive.
        token, begun, ended = trio.lowlevel.current_trio_token(), list[bool](), trio.Event()

        def noted() -> T:
            begun.append(True)
            try:
                return work()
            finally:
                # Abandoned, and the program has gone on without it.
                with suppress(trio.RunFinishedError):
                    token.run_sync_soon(ended.set)

        try:
            return await run_on_thread(noted, self._limiter, thread_name="cache directory")
        except trio.Cancelled:
            if begun:
                with trio.move_on_after(LAST_WORK_S, shield=True):
                    await ended.wait()
            raise


Lane = Literal["quick", "slow", "grammar", "long grammar"]
Arguments = TypeVarTuple("Arguments")
GRAMMAR_SHARE = 4  # Share of a lane that grammars of one client may have, as its denominator.


@attrs.frozen
class LaneSize:
    """Numbers of threads. Each tokenizing thread takes a core from an engine on the CPU."""

    threads: int
    of_client: float = inf


SIZES: dict[Lane, LaneSize] = {
    "quick": LaneSize(2),
    "slow": LaneSize(2),
    "grammar": LaneSize(2, of_client=1),
    "long grammar": LaneSize(2, of_client=1),
}


@attrs.define(eq=False)
class Ticket:
    client: str
    called: trio.Event = attrs.field(factory=trio.Event)
    refused: Problem | None = None


class FairLane:
    """The turns of one lane: of clients, then of each one's requests by arrival."""

    def __init__(
        self,
        size: LaneSize,
        max_waiting: int,
        max_of_client: float,
        too_many: Callable[[], Problem],
    ) -> None:
        self._size = size
        self._max_waiting = max_waiting
        self._max_of_client = max_of_client
        self._too_many = too_many
        # Tickets by client, in the order of turns. No queue is empty.
        self._waiting: dict[str, deque[Ticket]] = {}
        self._at_work: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def is_busy(self) -> bool:
        return self._at_work.total() >= self._size.threads

    def ahead_of(self, client: str) -> int:
        return len(self._waiting.get(client, ())) + self._at_work[client]

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn. Raises `RequestFailed` (429) if too many wait."""
        ticket = Ticket(client)
        self._append(ticket)
        try:
            await ticket.called.wait()
            if ticket.refused is not None:
                raise RequestFailed(ticket.refused)
            yield
        finally:
            self._leave(ticket)

    def _append(self, ticket: Ticket) -> None:
        queue = self._waiting.setdefault(ticket.client, deque())
        queue.append(ticket)
        self._call()
        if ticket.called.is_set():
            return
        if len(queue) > self._max_of_client:
            self._refuse(ticket, self._too_many())
        elif self.waiting > self._max_waiting:
            longest = max(reversed(self._waiting.values()), key=len)
            self._refuse(
                queue[-1] if len(queue) == len(longest) else longest[-1],
                queue_full(self._max_waiting),
            )

    def _refuse(self, ticket: Ticket, problem: Problem) -> None:
        self._remove(ticket)
        ticket.refused = problem
        ticket.called.set()

    def _remove(self, ticket: Ticket) -> None:
        queue = self._waiting[ticket.client]
        queue.remove(ticket)
        if not queue:
            del self._waiting[ticket.client]

    def _leave(self, ticket: Ticket) -> None:
        if not ticket.called.is_set():
            self._remove(ticket)
        elif ticket.refused is None:
            self._at_work[ticket.client] -= 1
            self._at_work += Counter()  # Forgets clients without a turn.
            if queue := self._waiting.pop(ticket.client, None):
                # Behind all others, which may have come later.
                self._waiting[ticket.client] = queue
            self._call()

    def _call(self) -> None:
        while not self.is_busy and (client := self._next()) is not None:
            queue = self._waiting.pop(client)
            ticket = queue.popleft()
            if queue:
                self._waiting[client] = queue  # Behind all others.
            self._at_work[client] += 1
            ticket.called.set()

    def _next(self) -> str | None:
        return next(
            (client for client in self._waiting if self._at_work[client] < self._size.of_client),
            None,
        )


class Lanes:
    def __init__(self, max_waiting: int) -> None:
        share = max(1, max_waiting // GRAMMAR_SHARE)
        self._lanes = {
            lane: FairLane(
                size,
                max_waiting,
                share if size.of_client < inf else inf,
                lambda: grammars_full(share, GRAMMAR_SHARE),
            )
            for lane, size in SIZES.items()
        }
        self._threads = trio.CapacityLimiter(sum(size.threads for size in SIZES.values()))

    def __getitem__(self, lane: Lane) -> FairLane:
        return self._lanes[lane]

    async def run(self, work: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        """Run `work` on a thread. Cancellation abandons the thread, which owns only its result."""
        return await run_on_thread(partial(work, *arguments), self._threads)
