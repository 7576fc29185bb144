"""The waiting queue: sequences without a row, oldest first; preempted ones before all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Ordered

from trouper.actors.scheduling.crash_attribution import Blame
from trouper.actors.scheduling.crash_isolation import may_enter
from trouper.actors.scheduling.running_batch import RunningBatch
from trouper.actors.scheduling.sequence import Sequence


class WaitingQueue:
    def __init__(self) -> None:
        self._sequences: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def append(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)

    def prepend(self, sequence: Sequence) -> None:
        """For a sequence that was preempted: it goes on as soon as there is room."""
        self._sequences.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def clear(self) -> None:
        self._sequences.clear()

    def remove_aborted(self) -> list[Sequence]:
        """Sequences whose client left. A suspect stays: it is tried to its end, since a client that leaves early could otherwise
        crash the engine as often as it likes."""
        aborted = [sequence for sequence in self._sequences if sequence.aborted and not sequence.standing.suspect]
        for sequence in aborted:
            self._sequences.remove(sequence)
        return aborted

    def candidates(self, batch: RunningBatch, blame: Blame, *, idle: bool, now: float) -> Ordered[Sequence]:
        """Sequences that may enter the batch, in order, as far as isolated rows let them. `idle`: no plan is in flight."""
        return may_enter(
            tuple(self._sequences),
            [sequence.standing for sequence in (*batch.rows.values(), *batch.removed.values())],
            blame.trial_order(sequence.standing for sequence in self._sequences),
            idle=idle,
            apart=blame.apart(now),
            now=now,
        )
