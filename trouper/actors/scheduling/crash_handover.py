"""Handover from a crashed scheduler to the next. A sequence continues with the next token and keeps
the `Standing`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import attrs

from trouper.actors.scheduling.allocation_failures import no_memory
from trouper.actors.scheduling.crash_attribution import Involved
from trouper.actors.scheduling.crash_recovery import LeftBehind, Recovery, crashes_engine
from trouper.actors.scheduling.preemption import Preemption
from trouper.actors.scheduling.prefix_cache import PrefixCache
from trouper.actors.scheduling.running_batch import RunningBatch
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.step_statistics import SchedulerCounters
from trouper.actors.scheduling.waiting_queue import WaitingQueue
from trouper.protocol.plans import Plan
from trouper.protocol.problems import SYSTEM_SHORTAGE, Problem

log = logging.getLogger("trouper.scheduler")


@attrs.frozen(kw_only=True, eq=False)
class CrashHandover:
    recovery: Recovery
    queue: WaitingQueue
    batch: RunningBatch
    cache: PrefixCache
    counters: SchedulerCounters
    preemption: Preemption
    taken: deque[Sequence] = attrs.field(factory=deque, init=False)
    """Sequences taken over and not queued yet; the first is suspect of a crash meanwhile."""

    def take_up(self, now: float) -> None:
        """Queue the sequences. Convicted contents and rows too large for the device are refused."""
        self.taken.extend(self.recovery.take_up())
        while self.taken:
            self._take(self.taken[0], now)

    def _take(self, sequence: Sequence, now: float) -> None:
        if self.recovery.blame.condemns(sequence.standing, sequence.num_output_tokens, now):
            self.taken.popleft()
            self.refuse(sequence, now)
            return
        lacking = None
        if self.recovery.allocations.refuses(sequence.standing):
            lacking = no_memory(sequence.num_tokens)
        elif self.recovery.shortages.refuses(sequence.standing):
            lacking = SYSTEM_SHORTAGE
        if lacking is not None:
            self.taken.popleft()
            sequence.fail(lacking)
            self.counters.add(requests_errored=1)
            return
        tokens, request = bytes(sequence.chain.tokens), sequence.request
        sequence.chain = self.cache.chain(tokens, request.cache_salt, request.cache_scope)
        self.queue.append(sequence)
        self.taken.popleft()
        if sequence.started:
            self.recovery.note_resumed()

    def refuse(self, sequence: Sequence, now: float) -> None:
        log.warning(
            "request %s is refused: its content made the engine crash", sequence.request.request_id
        )
        quarantine = self.recovery.blame.quarantine
        sequence.fail(crashes_engine(quarantine.left_s(sequence.standing.content, now)))
        self.recovery.note_refused()
        self.counters.add(requests_errored=1)

    def passed(self, sequence: Sequence, now: float) -> None:
        """Acquit a suspect, whose row makes room for another's trial."""
        self.recovery.blame.passed(sequence.standing, now)
        if not sequence.dropped and any(queued.standing.suspect for queued in self.queue):
            self.preemption.preempt(sequence, now, "trial")

    def leave(
        self,
        unanswered: Iterable[Plan],
        handled: Sequence | None,
        admitted: Sequence | None,
        *,
        proving: bool,
        closed: bool,
        problem: Problem,
        used_bytes: int,
        now: float,
    ) -> None:
        """Hand sequences to the next scheduler, if allowed. `handled`, whose token was at work, is
        refused. `admitted` is tried again. `proving`: the
        crashed plans had no client. `used_bytes`: of rows and cached blocks."""
        plans = tuple(unanswered)
        self._keep_aborted(plans)
        involved = () if proving else self._involved(plans)
        if handled is not None:
            involved = (
                involvement(handled, fresh=True, planned_tokens=handled.num_scheduled_tokens),
            )
            self.batch.rows.pop(handled.id, None)
            self.recovery.blame.quarantine.add(handled.standing.content, now)
            self.refuse(handled, now)
        elif (suspect := self.taken[0] if self.taken else admitted) is not None:
            involved = (involvement(suspect, fresh=True, planned_tokens=suspect.num_output_tokens),)
        left = LeftBehind(
            carried=self._carried(),
            involved=involved,
            certain=handled is not None,
            closed=closed,
            problem=problem,
            used_bytes=used_bytes,
        )
        self.counters.add(requests_errored=self.recovery.hand_over(left))

    def _carried(self) -> tuple[Sequence, ...]:
        carried = (*self.batch.rows.values(), *self.queue, *self.taken)
        for sequence in carried:
            sequence.carry_over()
        self.batch.rows.clear()
        self.queue.clear()
        self.taken.clear()
        return carried

    def _keep_aborted(self, unanswered: tuple[Plan, ...]) -> None:
        """Carry over aborted sequences that may have caused the crash; finish the others."""
        in_flight = {row for plan in unanswered for row in plan.rows}
        for row in tuple(self.batch.aborted):
            if row in in_flight:
                self.batch.rows[row] = self.batch.removed.pop(row)
            else:
                self.batch.finish_aborted(row)

    def _involved(self, unanswered: tuple[Plan, ...]) -> tuple[Involved, ...]:
        items = {order.item for plan in unanswered for order in plan.encode}
        encoding = {row for row, sequence in self.batch.rows.items() if sequence.needs_image(items)}
        fresh = encoding.union(*(plan.fresh_rows for plan in unanswered))
        rows = encoding.union(*(plan.rows for plan in unanswered))
        return tuple(
            involvement(
                sequence,
                fresh=row in fresh or sequence.num_output_tokens - sequence.num_resumed_tokens < 2,
                planned_tokens=sequence.num_scheduled_tokens + sequence.num_draft_tokens,
            )
            for row, sequence in self.batch.named(rows).items()
        )


def involvement(sequence: Sequence, *, fresh: bool, planned_tokens: int) -> Involved:
    return Involved(
        standing=sequence.standing,
        fresh=fresh,
        output_tokens=sequence.num_output_tokens,
        planned_tokens=planned_tokens,
    )
