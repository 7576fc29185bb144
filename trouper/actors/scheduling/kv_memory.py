"""KV memory: running rows and cached blocks share a limit, which holds after each plan unless a
single row runs.

Rows come first. If they outgrow what cached blocks leave them, three things are done until they
fit, in this order:

1. Cached blocks that nobody uses are evicted, least recently used first.
2. Blocks that running rows have stored of their own KV are copies: rows let go of them, and these
  are evicted. The row that would be preempted first keeps its copy, since it returns by it.
3. Rows are preempted: of the lowest priority the youngest first. The last row never is.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered

import attrs

from trouper.actors.scheduling.found_prefix import Found
from trouper.actors.scheduling.memory_budget import CountedRows, MemoryBudget
from trouper.actors.scheduling.preemption import Preemption
from trouper.actors.scheduling.prefix_cache import PrefixCache
from trouper.actors.scheduling.running_batch import RunningBatch
from trouper.actors.scheduling.scheduler_counters import SchedulerCounters
from trouper.actors.scheduling.sequence import Sequence
from trouper.protocol.plans import KvBound

MAX_SPARE = 32
"""How many times as large as needed the engine's buffers can be: eight slots for one row, each four
times as long as the row."""


@attrs.define(kw_only=True, eq=False)
class KvMemory:
    budget: MemoryBudget
    batch: RunningBatch
    cache: PrefixCache
    preemption: Preemption
    counters: SchedulerCounters
    row_bytes: int = 0
    """Bytes that rows may hold after the plan in composition."""
    _counted: CountedRows = attrs.field(init=False)
    """The rows of which `row_bytes` follows: none is looked at again for each sequence that may
    enter beside them."""

    @_counted.default
    def _count_none(self) -> CountedRows:
        return self.budget.count(())

    # -- rows that run ---------------------------------------------------------------------------

    def relieve(self, now: float, choose_proposers: Callable[[Sequence], None]) -> None:
        """Make room for what rows may hold after the next plan, and for the first of the queue if
        its priority is higher than that of rows. Comes before the plan stores anything. How much
        the first takes follows from what may draft for it (`choose_proposers`)."""
        rows = self._rows()
        self._count(rows)
        limit = self.budget.limit_bytes
        if limit is not None:
            if self.row_bytes + self.cache.bytes > limit:
                self._fit(rows, limit, now)
            first = self.preemption.queue.first(now)
            if first is not None and first.is_ready:
                choose_proposers(first)
                self._make_way(first, limit, now)
        self.bound_cache()

    def bound_buffers(self) -> KvBound | None:
        """Bound of the engine's buffers in the step of the plan in composition, with the rows that
        it admits. None while memory is so plentiful that room to spare cannot exceed it."""
        limit = self.budget.limit_bytes
        if limit is None:
            return None
        limit_bytes = max(0, limit - self.cache.bytes)
        return (
            None
            if MAX_SPARE * self.row_bytes <= limit_bytes
            else KvBound(limit_bytes, self.row_bytes)
        )

    def bound_cache(self) -> None:
        """Bound cached blocks to what rows leave, among them rows that the plan in composition
        drops: it stores before that."""
        limit = self.budget.limit_bytes
        if limit is not None:
            dropping = self.batch.dropping
            limit = max(0, limit - self.row_bytes - (self._bytes_of(dropping) if dropping else 0))
        self.cache.bound(limit)

    def _count(self, rows: Ordered[Sequence]) -> None:
        self._counted = self.budget.count(rows)
        self.row_bytes = self.budget.rows_bytes(self._counted)

    def _bytes_of(self, rows: Ordered[Sequence]) -> int:
        return self.budget.rows_bytes(self.budget.count(rows))

    def _rows(self) -> list[Sequence]:
        """Rows that no plan drops."""
        return [row for row in self.batch.rows.values() if not row.dropped]

    def _fit(self, rows: list[Sequence], limit: int, now: float) -> None:
        """Free memory until the rows fit."""
        rows.sort(key=_kept_longest)
        excess = self._evict(rows[:-1], self.row_bytes + self.cache.bytes - limit)
        while excess > 0 and len(rows) > 1:
            excess -= self._preempt(rows.pop(), now)
        if excess > 0:
            self._evict(rows, excess)

    def _evict(self, rows: Ordered[Sequence], nbytes: int) -> int:
        """Evict cached blocks, and where these are too few copies of what `rows` hold. Returns the
        number of bytes that are missing then."""
        nbytes -= self.cache.evict(max(0, nbytes))
        for row in rows:
            if nbytes <= 0:
                break
            self.cache.release(row)
            nbytes -= self.cache.evict(nbytes)
        return nbytes

    def _preempt(self, row: Sequence, now: float) -> int:
        """Returns the number of bytes that become free."""
        before = self.row_bytes
        self.preemption.preempt(row, now)
        self.counters.add(preemptions=1)
        self._count(self._rows())
        return before - self.row_bytes

    def _make_way(self, first: Sequence, limit: int, now: float) -> None:
        """Preempt rows of a lower priority than `first` of the queue, if that lets it enter: as
        many as it needs, or all where it has room only alone. Only for memory: where all rows are
        in use it waits, as in vLLM."""
        if self._has_room(self._counted, first, limit):
            return
        rows = self._rows()
        lower = sorted(
            (row for row in rows if row.priority > first.request.priority), key=_kept_longest
        )
        others = [row for row in rows if row not in lower]
        isolated = any(row.standing.isolated for row in (first, *rows))
        if isolated or not lower or not self._has_room(self.budget.count(others), first, limit):
            return
        while lower and not self._has_room(self._counted, first, limit):
            self._preempt(lower.pop(), now)

    def _has_room(self, rows: CountedRows, entering: Sequence, limit: int) -> bool:
        """Whether a waiting sequence may enter beside these rows. Alone it may, whatever it takes
        (`admits`), and while the device's memory is nearly full only alone."""
        if not rows.lengths:
            return True
        return not self.budget.memory.latest.under_pressure and self.budget.admits(
            rows, entering, limit
        )

    # -- rows that enter -------------------------------------------------------------------------

    def admits(self, sequence: Sequence, *, idle: bool) -> bool:
        """Whether there is room for a waiting sequence's prompt beside other rows. Alone it always
        enters, but after a failed allocation only when no plan is in flight (`idle`): if its step
        fails, it is known that it ran alone, and no row loses tokens. Cached blocks make room."""
        limit = self.budget.limit_bytes
        if limit is None:
            return True
        if not self.row_bytes:
            return idle or self.budget.allocations.bound_bytes is None
        return self.budget.admits(self._counted, sequence, limit)

    def enter(self, sequence: Sequence, found: Found) -> Found | None:
        """Make room for a sequence that enters now, but evict nothing that it restores. Returns
        what it can restore, which is less than `found` where row and blocks do not fit together;
        None: it must wait, since others use too many blocks."""
        limit, counted = self.budget.limit_bytes, self.budget.with_entering(self._counted, sequence)
        row_bytes = self.budget.rows_bytes(counted)
        if limit is not None:
            room = max(0, limit - row_bytes)
            found = self.cache.cut(sequence.chain, found, room)
            restored = found.match.nodes[-1:]
            self.cache.pin(restored)
            excess = self._evict(self._rows(), self.cache.bytes - room)
            self.cache.unpin(restored)
            if excess > 0 and self.row_bytes:
                return None
        self._counted, self.row_bytes = counted, row_bytes
        return found


def _kept_longest(row: Sequence) -> tuple[float, float, int]:
    """Sort key: the row that is preempted last comes first."""
    return row.priority, row.arrived_at, row.id
