"""Lanes of worker threads: long and short texts, long and short grammars. No lane waits for
another.

Clients of a lane take turns, so many requests of one client delay another by the work at hand at
most. Each lane compiles two grammars at a time, one for each client, so a grammar that never
compiles blocks only its client. A full lane refuses the client with the most requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from typing import Literal, TypeVar, TypeVarTuple, Unpack

import attrs
import trio

from trouper.actors.runtime.worker_threads import run_on_thread
from trouper.protocol.problems import Problem, RequestFailed, grammars_full, queue_full

Lane = Literal["quick", "slow", "grammar", "long grammar"]
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
GRAMMAR_SHARE = 4
"""Share of a lane that grammars of one client may have, as its denominator."""


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
    """The turns of one lane. Clients take turns; each client's requests are first come, first
    served."""

    def __init__(
        self,
        size: LaneSize,
        max_waiting: int,
        max_of_client: float,
        too_many: Callable[[], Problem],
    ) -> None:
        """`max_waiting`: tickets that may wait; `max_of_client`: those of one client; `too_many`:
        refusal beyond that."""
        self._size, self._max_waiting, self._max_of_client, self._too_many = (
            size,
            max_waiting,
            max_of_client,
            too_many,
        )
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
