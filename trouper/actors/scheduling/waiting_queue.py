"""Sequences without a row, by priority, then by arrival, preempted ones first. Tenants take turns
within a priority."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Ordered
from itertools import islice
from typing import Protocol, TypeVar

from trouper.actors.scheduling.crash_attribution import Blame, Standing
from trouper.actors.scheduling.running_batch import RunningBatch
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.tenant_shares import TenantShares
from trouper.protocol.requests import BATCH_PRIORITY, Generate

MAX_COMPARED = 256
PACED = 64
"""Latest entries from whose times the queue's pace follows."""
LONE_PATIENCE_S = 10.0
"""Time for which others may overtake a request that must run alone."""


# After `max_wait_s` a sequence is overdue and precedes all others, lest lower numbers starve higher
# ones. Requests of batches become overdue one at a time (`preemption.py`).
class WaitingQueue:
    def __init__(self, shares: TenantShares, max_wait_s: float = 0.0) -> None:
        """`max_wait_s` 0: no sequence becomes overdue."""
        self._shares, self._max_wait_s = shares, max_wait_s
        # Sequences by priority. No class is empty.
        self._classes: dict[int, deque[Sequence]] = {}
        self.num_preempted = 0
        # When the queue was last empty, or an earlier entry, then the latest entries into rows.
        self._entered_at: deque[float] = deque(maxlen=PACED)

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def is_full_for(self, request: Generate, size: int) -> bool:
        # Batches take no room from others, and bound the number of their requests themselves.
        return (
            request.priority != BATCH_PRIORITY
            and self._shares.waiting[False, request.tenant] >= size
        )

    def half_s(self, now: float) -> float:
        """Seconds in which half of the queue enters at its pace so far. Who comes back then meets
        room, and the queue is not yet empty."""
        if not self._entered_at:
            return 0.0
        entered = max(1, len(self._entered_at) - 1)
        return len(self) / 2 * (now - self._entered_at[0]) / entered

    @property
    def has_others(self) -> bool:
        return any(priority != BATCH_PRIORITY for priority in self._classes)

    @property
    def others_may_enter(self) -> bool:
        # An isolated sequence waits for all rows to end.
        classes = (
            sequences for priority, sequences in self._classes.items() if priority != BATCH_PRIORITY
        )
        return any(
            one.is_ready and not one.standing.isolated for sequences in classes for one in sequences
        )

    @property
    def first_of_batches(self) -> Sequence | None:
        return next(iter(self._classes.get(BATCH_PRIORITY, ())), None)

    def __iter__(self) -> Iterator[Sequence]:
        """By priority and by turns of tenants, regardless of overdue sequences."""
        for priority in sorted(self._classes):
            yield from self._shares.in_turn(self._classes[priority])

    def count_sharing(self, sequence: Sequence, num_tokens: int, at_most: int) -> int:
        """Count sequences with the same first `num_tokens` tokens, this one included, up to
        `at_most`."""
        chain = sequence.chain
        start = chain.part(0, num_tokens)
        near = islice(
            (other.chain for other in self if other.chain.root is chain.root), MAX_COMPARED
        )
        return sum(islice((1 for other in near if other.starts_with(start)), at_most))

    def append(self, sequence: Sequence) -> None:
        if not self._classes:
            self._entered_at.clear()
            self._entered_at.append(sequence.queued_at)
        self.num_preempted += sequence.started
        self._shares.enter(self._shares.waiting, sequence)
        self._class_of(sequence).append(sequence)

    def prepend(self, sequence: Sequence, now: float) -> None:
        sequence.queued_at = now
        self.num_preempted += sequence.started
        self._shares.enter(self._shares.waiting, sequence)
        self._class_of(sequence).appendleft(sequence)

    def enter(self, sequence: Sequence, now: float) -> None:
        """Remove a sequence that gets a row."""
        self.remove(sequence)
        self._entered_at.append(now)

    def remove(self, sequence: Sequence) -> None:
        waiting = self._class_of(sequence)
        waiting.remove(sequence)
        self._shares.leave(self._shares.waiting, sequence)
        self.num_preempted -= sequence.started
        if not waiting:
            del self._classes[sequence.request.priority]

    def clear(self) -> None:
        self._classes.clear()
        self._shares.waiting.clear()
        self.num_preempted = 0

    def remove_aborted(self) -> list[Sequence]:
        # A suspect stays, and is tried to its end: else a client that leaves early could crash the
        # engine again and again.
        aborted = [
            sequence
            for sequence in self
            if sequence.client.aborted and not sequence.standing.suspect
        ]
        for sequence in aborted:
            self.remove(sequence)
        return aborted

    def ordered(self, now: float) -> Ordered[Sequence]:
        waiting = tuple(self)
        if len(self._classes) < 2 or not self._max_wait_s:
            return waiting
        for sequence in waiting:
            sequence.overdue |= (
                not sequence.of_batch and now - sequence.queued_at > self._max_wait_s
            )
        return sorted(
            waiting,
            key=lambda sequence: (not sequence.overdue, sequence.overdue and sequence.arrived_at),
        )

    def first(self, now: float) -> Sequence | None:
        return next(iter(self.ordered(now)), None)

    def candidates(
        self, batch: RunningBatch, blame: Blame, *, idle: bool, now: float
    ) -> Ordered[Sequence]:
        """Sequences that may enter, as far as isolated rows permit. `idle`: no plan is in
        flight."""
        return may_enter(
            self.ordered(now),
            [sequence.standing for sequence in (*batch.rows.values(), *batch.removed.values())],
            blame.trial_order(sequence.standing for sequence in self),
            idle=idle,
            apart=blame.apart(now),
            now=now,
        )

    def _class_of(self, sequence: Sequence) -> deque[Sequence]:
        return self._classes.setdefault(sequence.request.priority, deque())


class Queued(Protocol):
    @property
    def standing(self) -> Standing: ...

    @property
    def since(self) -> float: ...


Q = TypeVar("Q", bound=Queued)


def may_enter(
    waiting: Ordered[Q],
    present: Collection[Standing],
    trials: Ordered[Standing],
    *,
    idle: bool,
    apart: bool,
    now: float,
) -> Ordered[Q]:
    """Requests that may enter now, in order. `present`: rows in the engine or with unanswered
    last plans. `trials`: suspects in order. `idle`: no plan is in flight. `apart`: all rows run
    alone."""
    # A row that runs alone enters when nothing is in flight, so that a crash can have come from
    # nobody else.
    if any(standing.isolated for standing in present) or (apart and present):
        return ()
    free = idle and not present
    if trials:
        first = next(queued for queued in waiting if queued.standing is trials[0])
        return (first,) if free else ()
    if apart:
        return waiting[:1] if free else ()
    return _with_lone(waiting, free=free, now=now)


def _with_lone(waiting: Ordered[Q], *, free: bool, now: float) -> Ordered[Q]:
    lone = [index for index, queued in enumerate(waiting) if queued.standing.alone]
    if not lone:
        return waiting
    if lone[0] == 0 and free:
        return waiting[:1]
    overdue = next(
        (index for index in lone if now - waiting[index].since > LONE_PATIENCE_S), len(waiting)
    )
    return [queued for queued in waiting[:overdue] if not queued.standing.alone]
