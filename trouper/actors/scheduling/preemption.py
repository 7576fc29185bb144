"""Preemption: a sequence leaves its row before the end of its answer, and goes on later in another
row.

What its row has computed is stored by the plan that drops the row, as far as there is room, so that
it resumes from its own blocks, in memory or on disk, and computes the remainder again. Tokens that
were on their way are sampled again, with the same result.
"""

from __future__ import annotations

from math import inf

import attrs

from trouper.actors.scheduling.running_batch import RunningBatch
from trouper.actors.scheduling.scheduler_counters import SchedulerCounters
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.waiting_queue import WaitingQueue
from trouper.protocol.replies import Progress
from trouper.protocol.settings import Settings

RESUME_S = 1.0
"""Time without other requests after which all rows of batches may run again."""


@attrs.frozen(kw_only=True, eq=False)
class Preemption:
    queue: WaitingQueue
    batch: RunningBatch

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take a sequence out of the batch and put it before all others of its priority in the
        queue."""
        self.batch.remove(sequence)
        sequence.preempt()
        sequence.read = None  # What it has read may be on disk alone when it returns.
        self.queue.prepend(sequence, now)
        sequence.client.report(Progress(now, preempted=True))


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
        movable = [row for row in rows if row.can_be_preempted and not row.overdue]
        movable.sort(key=lambda row: (row.arrived_at, row.id))
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
