"""Preemption: a sequence leaves a row early and resumes later in another. Tokens in flight are
sampled again, with the same result."""

from __future__ import annotations

from math import inf

import attrs

from trouper.actors.scheduling.running_batch import RunningBatch
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.step_statistics import SchedulerCounters
from trouper.actors.scheduling.tenant_shares import Tenant, TenantShares, tenant_of
from trouper.actors.scheduling.waiting_queue import WaitingQueue
from trouper.protocol.replies import Progress
from trouper.protocol.settings import Settings
from trouper.protocol.waits import WaitReason

# A client that asks again at once then preempts nothing.
RESUME_S = 1.0
"""Time without other requests after which batches may use all rows again."""


@attrs.frozen(kw_only=True, eq=False)
class Preemption:
    queue: WaitingQueue
    batch: RunningBatch

    def preempt(self, sequence: Sequence, now: float, reason: WaitReason) -> None:
        """`reason`: the wait until the sequence returns."""
        self.batch.remove(sequence)
        sequence.preempt(reason)
        sequence.read = None  # What it has read may be on disk alone when it returns.
        self.queue.prepend(sequence, now)
        sequence.client.report(Progress(now, preempted=True))


# Requests of batches yield to others, since each row makes every step longer: meanwhile batches
# keep `--batch-min-rows` rows. If others need all rows, a request of a batch becomes overdue after
# `--priority-max-wait-s`, and keeps the row to the end.
@attrs.define(eq=False)
class BatchYielding:
    preemption: Preemption
    counters: SchedulerCounters
    settings: Settings
    # Time of the last plan with other requests.
    _others_at: float = -inf
    # Time at which a request of a batch last ran, or began to wait; inf: there is none.
    _ran_at: float = inf

    def yield_rows(self, now: float) -> None:
        """Preempt rows of batches, or let one become overdue. Comes first in a plan."""
        rows, others = self._rows()
        if others or self.preemption.queue.has_others:
            self._others_at = now
            if rows:
                self._preempt(rows, now)
        self._mark_overdue(now, runs=bool(rows))

    def admits(self, sequence: Sequence, now: float) -> bool:
        if not sequence.of_batch or now - self._others_at >= RESUME_S:
            return True
        return len(self._rows()[0]) < self.settings.batch_min_rows

    def _rows(self) -> tuple[list[Sequence], bool]:
        batch = self.preemption.batch
        if not batch.num_rows_of_batches:  # Most servers have none, and this is asked in each step.
            return [], any(not row.dropped for row in batch.rows.values())
        running = [row for row in batch.rows.values() if not row.dropped]
        rows = [row for row in running if row.of_batch]
        return rows, len(rows) < len(running)

    def _preempt(self, rows: list[Sequence], now: float) -> None:
        # One more if another request waits for a row alone and all rows are in use. A request that
        # waits for a prefix or the disk would not take the row, and the batch would return in each
        # step.
        excess = len(rows) - self.settings.batch_min_rows
        queue = self.preemption.queue
        batch = self.preemption.batch
        if batch.num_rows - max(0, excess) >= self.settings.rows and queue.others_may_enter:
            excess = max(0, excess) + 1
        if excess <= 0:
            return
        movable = [row for row in rows if row.can_be_preempted and not row.overdue]
        movable.sort(key=lambda row: (row.arrived_at, row.id))
        for row in reversed(movable[-excess:]):
            self.preemption.preempt(row, now, "priority")
            self.counters.add(preemptions=1)

    def _mark_overdue(self, now: float, *, runs: bool) -> None:
        """Let the first request of a batch become overdue if none ran for --priority-max-wait-s."""
        first = self.preemption.queue.first_of_batches
        if runs or first is None:
            self._ran_at = now if runs else inf
            return
        self._ran_at = min(self._ran_at, now)
        first.overdue |= 0 < self.settings.priority_max_wait_s < now - self._ran_at


PATIENCE_S = 2.0


@attrs.define(eq=False)
class RowReclaiming:
    shares: TenantShares
    preemption: Preemption
    counters: SchedulerCounters
    # Since when a tenant has had more rows than its share beside another one; inf: none has.
    _beyond_since: float = inf

    def reclaim_rows(self, now: float) -> None:
        """Preempt rows beyond shares. Comes before a plan counts rows."""
        beyond = self._beyond() if self.shares.contended else []
        if not beyond:
            self._beyond_since = inf
            return
        self._beyond_since = min(self._beyond_since, now)
        patient = now - self._beyond_since < PATIENCE_S
        for row in beyond[: self._num_awaited() if patient else None]:
            self.preemption.preempt(row, now, "share")
            self.counters.add(preemptions=1)

    def _beyond(self) -> list[Sequence]:
        share, running = self.shares.row_share, self.shares.running
        excess = {
            tenant: count - share
            for tenant, count in running.items()
            if count > share and not tenant[0]
        }
        if not excess:
            return []
        rows = [
            row
            for row in self.preemption.batch.rows.values()
            if tenant_of(row) in excess and row.can_be_preempted and not row.dropped
        ]
        beyond: list[Sequence] = []
        for row in sorted(rows, key=lambda row: (row.arrived_at, row.id), reverse=True):
            if excess[tenant_of(row)] > 0:
                excess[tenant_of(row)] -= 1
                beyond.append(row)
        return beyond

    def _num_awaited(self) -> int:
        """Rows beyond the free ones that tenants below a full share wait for."""
        shares, batch = self.shares, self.preemption.batch
        ready: dict[Tenant, int] = {}
        for sequence in self.preemption.queue:
            tenant = tenant_of(sequence)
            if not tenant[0] and sequence.is_ready and shares.running[tenant] < shares.row_share:
                ready[tenant] = ready.get(tenant, 0) + 1
        num_rows = sum(
            min(count, shares.row_share - shares.running[tenant]) for tenant, count in ready.items()
        )
        return max(0, num_rows - (shares.rows - batch.num_rows))
