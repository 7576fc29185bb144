"""Requests of batches yield to others: while these run or wait, batches keep `--batch-min-rows`
rows, and the rest of theirs are preempted.

Each row that decodes makes a step longer on devices where rows cost time, so it is paid by every
stream beside it. Rows are preempted the youngest first, are stored as any row that leaves, and
enter again once no other request was there for RESUME_S: a client that asks again at once does not
preempt them again.

Batches go on all the same. The rows that they keep go on in every step. Where others need all rows,
batches have none; then, after `--priority-max-wait-s` without one, the request of a batch that
waits longest is overdue, as one of a client would be, and keeps its row to its end.
"""

from __future__ import annotations

from math import inf

import attrs

from trouper.actors.scheduling.preemption import Preemption
from trouper.actors.scheduling.scheduler_counters import SchedulerCounters
from trouper.actors.scheduling.sequence import Sequence
from trouper.protocol.settings import Settings

RESUME_S = 1.0
"""Time without other requests after which all rows of batches may run again."""


@attrs.define(eq=False)
class BatchYielding:
    preemption: Preemption
    counters: SchedulerCounters
    settings: Settings
    _others_at: float = -inf
    """Time of the last plan at which other requests ran or waited."""
    _ran_at: float = inf
    """Time of the last plan at which a request of a batch ran, or at which one began to wait; inf:
    none is there."""

    def yield_rows(self, now: float) -> None:
        """Preempt rows of batches, or let a request of a batch become overdue. Comes first in a
        plan."""
        rows, others = self._rows()
        if others or self.preemption.queue.has_others:
            self._others_at = now
            if rows:
                self._preempt(rows, now)
        self._mark_overdue(now, runs=bool(rows))

    def admits(self, sequence: Sequence, now: float) -> bool:
        """Whether a waiting sequence may have a row, as far as batches are concerned."""
        if not sequence.of_batch or now - self._others_at >= RESUME_S:
            return True
        return len(self._rows()[0]) < self.settings.batch_min_rows

    def _rows(self) -> tuple[list[Sequence], bool]:
        """Rows of batches that no plan drops, and whether there are others."""
        batch = self.preemption.batch
        if not batch.num_rows_of_batches:  # Most servers have none, and this is asked in each step.
            return [], any(not row.dropped for row in batch.rows.values())
        running = [row for row in batch.rows.values() if not row.dropped]
        rows = [row for row in running if row.of_batch]
        return rows, len(rows) < len(running)

    def _preempt(self, rows: list[Sequence], now: float) -> None:
        """Preempt rows beyond those that batches keep. One more, if another request waits for a row
        and all are in use. One that waits for a prefix or for the disk would not take the row, and
        the batch would return to it in the same plan, in each step."""
        excess, queue, batch = (
            len(rows) - self.settings.batch_min_rows,
            self.preemption.queue,
            self.preemption.batch,
        )
        if batch.num_rows - max(0, excess) >= self.settings.rows and queue.others_may_enter:
            excess = max(0, excess) + 1
        if excess <= 0:
            return
        movable = sorted(filter(_may_leave, rows), key=lambda row: (row.arrived_at, row.id))
        for row in reversed(movable[-excess:]):
            self.preemption.preempt(row, now)
            self.counters.add(preemptions=1)

    def _mark_overdue(self, now: float, *, runs: bool) -> None:
        """Let the first waiting request of a batch become overdue if none of them ran for
        --priority-max-wait-s."""
        first = self.preemption.queue.first_of_batches
        if runs or first is None:
            self._ran_at = now if runs else inf
            return
        self._ran_at = min(self._ran_at, now)
        first.overdue |= 0 < self.settings.priority_max_wait_s < now - self._ran_at


def _may_leave(row: Sequence) -> bool:
    """Whether a row may be preempted: not one that waited too long, is isolated after a crash, or
    would begin anew."""
    return not (row.overdue or row.standing.isolated or row.request.embed)
