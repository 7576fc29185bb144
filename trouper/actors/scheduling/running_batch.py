"""Sequences with a row in the engine, and departed ones until the engine has dropped the rows."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from trouper.actors.scheduling.sequence import Sequence, State
from trouper.actors.scheduling.step_statistics import SchedulerCounters
from trouper.actors.scheduling.tenant_shares import TenantShares
from trouper.protocol.plans import RowId
from trouper.protocol.problems import Problem


class RunningBatch:
    """Sequences by row id. A preempted sequence returns in another row."""

    def __init__(self, counters: SchedulerCounters, shares: TenantShares) -> None:
        self._counters, self._shares = counters, shares
        self.rows: dict[RowId, Sequence] = {}
        self.dropping: list[Sequence] = []
        self.removed: dict[RowId, Sequence] = {}
        """Removed sequences, until the plan with the drop is answered."""
        self.num_rows_of_batches = 0
        self.aborted: set[RowId] = set()
        self._ids = count()

    def next_id(self) -> RowId:
        return RowId(next(self._ids))

    @property
    def decoding(self) -> list[Sequence]:
        return self._in_state(State.DECODING)

    @property
    def prefilling(self) -> list[Sequence]:
        return self._in_state(State.PREFILLING)

    def _in_state(self, state: State) -> list[Sequence]:
        return [sequence for sequence in self.rows.values() if sequence.state is state]

    @property
    def num_rows(self) -> int:
        return sum(not sequence.dropped for sequence in self.rows.values())

    @property
    def num_rows_of_others(self) -> int:
        return sum(not (sequence.dropped or sequence.of_batch) for sequence in self.rows.values())

    def add(self, sequence: Sequence) -> None:
        sequence.enter(self.next_id())
        self.rows[sequence.id] = sequence
        self.num_rows_of_batches += sequence.of_batch
        self._shares.enter(self._shares.running, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a row, with a drop in the next plan. The only removal (F20)."""
        self.removed[sequence.id] = self.rows.pop(sequence.id)
        self.num_rows_of_batches -= sequence.of_batch
        self._shares.leave(self._shares.running, sequence)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Let the next plan drop the row, once."""
        if not sequence.dropped:
            sequence.dropped = True
            self.dropping.append(sequence)

    def take_drops(self) -> tuple[RowId, ...]:
        dropping, self.dropping = self.dropping, []
        return tuple(sequence.id for sequence in dropping)

    def abort(self, sequence: Sequence) -> None:
        """Remove now, and finish once the engine has dropped the row."""
        self.remove(sequence)
        self.aborted.add(sequence.id)
        sequence.preempt()

    def finish_aborted(self, row: RowId) -> None:
        self.aborted.remove(row)
        self.removed[row].finish()
        self._counters.add(requests_withdrawn=1)

    def dropped(self, row: RowId) -> Sequence | None:
        """Return the sequence of a row that the engine has dropped, unless removed before."""
        if row in self.aborted:
            self.finish_aborted(row)
        return self.removed.pop(row, None)

    def fail_all(self, problem: Problem) -> int:
        """Returns the number of rows."""
        for row in tuple(self.aborted):
            self.finish_aborted(row)
        failed = tuple(self.rows.values())
        for sequence in failed:
            sequence.fail(problem)
            self.remove(sequence)
        return len(failed)

    def named(self, rows: Iterable[RowId]) -> dict[RowId, Sequence]:
        sequences = self.removed | self.rows
        return {row: sequences[row] for row in rows if row in sequences}
