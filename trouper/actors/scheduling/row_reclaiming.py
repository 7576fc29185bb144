"""Rows beyond a tenant's share return to the queue, the youngest first: at once if another tenant
waits and no row is free, else after `PATIENCE_S`."""

from __future__ import annotations

from math import inf

import attrs

from trouper.actors.scheduling.preemption import Preemption
from trouper.actors.scheduling.scheduler_counters import SchedulerCounters
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.tenant_shares import Tenant, TenantShares, tenant_of

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
            self.preemption.preempt(row, now)
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
