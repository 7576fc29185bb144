"""KV memory: running rows and cached blocks share a limit, which holds after each plan unless a
single row runs. Pure."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import Self

import attrs

from trouper.actors.scheduling.allocation_failures import AllocationFailures
from trouper.actors.scheduling.core_edges import CoreWatches
from trouper.actors.scheduling.preemption import Preemption
from trouper.actors.scheduling.prefix_cache import Found, PrefixCache
from trouper.actors.scheduling.running_batch import RunningBatch
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.step_statistics import SchedulerCounters
from trouper.protocol.health import AdapterStats, MemoryStatus
from trouper.protocol.kv import BatchLengths, KvLayout, KvUsage
from trouper.protocol.model import ModelCard
from trouper.protocol.plans import KvBound
from trouper.protocol.problems import ContextExcess, Problem, context_full
from trouper.protocol.requests import ChatPrompt, Generate
from trouper.protocol.settings import Settings
from trouper.protocol.waits import WaitReason
from trouper.protocol.watch import Watch

# A layer of a 4B model has about three vectors of 10,000 numbers and ten of 2,500 at a time.
ACTIVATION_BYTES = 2**17
# Float32, penalized, with noise.
LOGIT_BYTES = 12
RESERVE, RETURN_RESERVE = 64, 16
"""Divisors: the part of the limit free at an entry, and at a return after preemption."""
# Buffers have at most eight slots for one row, each four times as long as the row.
MAX_SPARE = 32


@attrs.frozen(eq=False)
class CountedRows:
    lengths: BatchLengths
    drafts: bool = attrs.field(kw_only=True)


@attrs.define(kw_only=True, eq=False)
class MemoryBudget:
    kv: KvLayout
    weights_bytes: int
    """Without adapters."""
    margin_bytes: int
    kv_memory: int | None
    memory_fraction: float
    sharers: int
    max_draft_tokens: int
    memory: Watch[MemoryStatus]
    adapters: Watch[AdapterStats]
    allocations: AllocationFailures
    image_bytes: int = 0
    """Of encoded images, which leave less to rows and cached blocks."""
    row_bytes_known: bool = attrs.field(init=False)
    # Inputs of `_lasting`, which change once in seconds, while each step reads the limit several
    # times.
    _seen: tuple[MemoryStatus, AdapterStats] | None = attrs.field(default=None, init=False)
    _lasting: int | None = attrs.field(default=None, init=False)
    _usages: list[KvUsage] = attrs.field(factory=list, init=False)
    _counted: CountedRows = attrs.field(
        factory=lambda: CountedRows(BatchLengths(), drafts=False), init=False
    )

    @row_bytes_known.default
    def _knows_bytes(self) -> bool:
        return self.kv.row_bytes(1) > 0

    @classmethod
    def of(
        cls,
        card: ModelCard,
        settings: Settings,
        watches: CoreWatches,
        allocations: AllocationFailures,
    ) -> Self:
        return cls(
            kv=card.kv,
            weights_bytes=card.base_weights_bytes,
            margin_bytes=step_bytes(card, settings),
            kv_memory=None if settings.kv_memory is None else int(settings.kv_memory),
            memory_fraction=settings.memory_fraction,
            sharers=card.memory_sharers,
            max_draft_tokens=settings.spec_draft_tokens,
            memory=watches.memory,
            adapters=watches.adapters,
            allocations=allocations,
        )

    @property
    def limit_bytes(self) -> int | None:
        """Present limit in bytes; None if the device's limit or a row's bytes are unknown."""
        if not self.row_bytes_known:
            return None
        failed, pressure = self.allocations.bound_bytes, self.memory.latest.pressure_bound_bytes
        limit = self._lasting_bytes
        if failed is not None or pressure:
            limit = min_known(limit, failed, pressure or None)
        return None if limit is None else max(0, limit - self.image_bytes)

    @property
    def _lasting_bytes(self) -> int | None:
        """The limit without the bounds that hold for minutes only."""
        # Models in one process share the device equally: one alone would leave nothing to the
        # others' rows. If weights leave nothing, the estimate is useless: there is no bound, and
        # the janitor watches the device.
        if not self.row_bytes_known:
            return None
        memory, adapters = self.memory.latest, self.adapters.latest
        if self._seen is None or self._seen[0] is not memory or self._seen[1] is not adapters:
            room = room_bytes(
                memory,
                adapters,
                memory_fraction=self.memory_fraction,
                weights_bytes=self.weights_bytes,
                margin_bytes=self.margin_bytes,
            )
            device = room // self.sharers
            self._seen = memory, adapters
            self._lasting = min_known(self.kv_memory, device if device > 0 else None)
        return self._lasting

    def count(self, rows: Ordered[Sequence]) -> CountedRows:
        # The count of a decoding row stays the same until the row outgrows its capacity.
        usages = [
            row.kv_usage
            if row.num_scheduled_tokens < row.kv_usage_until and not row.num_draft_tokens
            else self._usage(row)
            for row in rows
        ]
        drafts = self.kv.draft_state_bytes > 0 and any(row.records for row in rows)
        if usages != self._usages or drafts != self._counted.drafts:
            self._usages, self._counted = usages, CountedRows(BatchLengths(usages), drafts=drafts)
        return self._counted

    def _usage(self, row: Sequence) -> KvUsage:
        usage = self.kv.usage(*self.lengths(row))
        if not (row.prefilling or row.num_draft_tokens):
            row.kv_usage, row.kv_usage_until = usage, row.num_scheduled_tokens + usage.lasts
        return usage

    def lengths(self, row: Sequence) -> tuple[int, int]:
        """Tokens that decide the row's bank, and the most after the next plan, drafts included."""
        if row.prefilling:
            return row.num_prefill_tokens, row.num_prefill_tokens + 1
        drafts = row.num_draft_tokens + (self.max_draft_tokens if row.records else 0)
        reserved = min(row.num_scheduled_tokens + drafts, row.max_tokens)
        return row.num_tokens - 1, row.num_prompt_tokens + reserved

    def with_entering(self, rows: CountedRows, entering: Sequence) -> CountedRows:
        """Count a sequence as prefilled, with one sampled token."""
        usage = self.kv.usage(entering.num_tokens, entering.num_tokens + 1)
        return CountedRows(
            rows.lengths.with_row(usage), drafts=rows.drafts or bool(entering.records)
        )

    def rows_bytes(self, rows: CountedRows) -> int:
        # If any row may draft, all keep earlier recurrent states.
        return self.kv.bytes_of(rows.lengths) + rows.drafts * self.kv.draft_state_bytes * len(
            rows.lengths
        )

    def admits(self, rows: CountedRows, entering: Sequence, limit: int) -> bool:
        """Whether a sequence may enter with a reserve left."""
        reserve = limit // (RETURN_RESERVE if entering.started else RESERVE)
        return self.rows_bytes(self.with_entering(rows, entering)) + reserve <= limit

    def restrict(self, sequence: Sequence) -> Problem | None:
        """Reduce `max_tokens` to the lasting limit. Returns a problem if not even one token
        fits."""
        limit = self._lasting_bytes
        fitting = None if limit is None else self.kv.max_tokens(limit)
        if fitting is None:
            return None
        if sequence.num_tokens + 1 > fitting:
            return too_long(sequence.request, sequence.num_prompt_tokens, fitting)
        sequence.output.max_tokens = min(sequence.max_tokens, fitting - sequence.num_prompt_tokens)
        return None


def step_bytes(card: ModelCard, settings: Settings) -> int:
    """Return the most bytes of a step beside weights and KV, by estimate."""
    # A step that encodes and prefills ends the one before it begins the other.
    prefill_bytes = settings.prefill_step_size * ACTIVATION_BYTES
    activations = max(prefill_bytes, card.encoder_step_bytes)
    return activations + settings.rows * card.vocab_size * LOGIT_BYTES


def room_bytes(
    memory: MemoryStatus,
    adapters: AdapterStats,
    *,
    memory_fraction: float,
    weights_bytes: int,
    margin_bytes: int,
) -> int:
    """Bytes beside weights, adapters and one step; negative if too few."""
    fixed_bytes = max(weights_bytes, memory.fixed_bytes) + adapters.nbytes + margin_bytes
    return int(memory.limit_bytes * memory_fraction) - fixed_bytes


def min_known(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def too_long(request: Generate, prompt_tokens: int, max_tokens: int) -> Problem:
    return context_full(
        ContextExcess(prompt_tokens, 1, max_tokens),
        "messages" if isinstance(request.prompt, ChatPrompt) else "prompt",
        flags="all that --kv-memory or --memory-fraction leaves to one request",
    ).problem


@attrs.define(kw_only=True, eq=False)
class KvMemory:
    budget: MemoryBudget
    batch: RunningBatch
    cache: PrefixCache
    preemption: Preemption
    counters: SchedulerCounters
    row_bytes: int = 0
    """After the current plan."""
    # Rows behind `row_bytes`, counted once for all sequences that may enter.
    _counted: CountedRows = attrs.field(init=False)
    _memory_seen: MemoryStatus = attrs.field(
        default=attrs.Factory(lambda self: self.budget.memory.latest, takes_self=True), init=False
    )
    _releases_seen: int = attrs.field(
        default=attrs.Factory(lambda self: self.budget.memory.latest.releases, takes_self=True),
        init=False,
    )

    @_counted.default
    def _count_none(self) -> CountedRows:
        return self.budget.count(())

    # -- pressure on the device ------------------------------------------------------------------

    def relieve_pressure(self) -> None:
        """Evict cached blocks once for each new report of pressure."""
        memory = self.budget.memory.latest
        if memory.under_pressure and memory is not self._memory_seen:
            excess = memory.active_bytes - memory.limit_bytes * self.budget.memory_fraction
            self.cache.evict(max(0, int(excess)))
        self._memory_seen = memory

    def take_release(self) -> bool:
        """Whether the plan gives memory back: once for each order of the janitor."""
        ordered = self.budget.memory.latest.releases
        release, self._releases_seen = ordered != self._releases_seen, ordered
        return release

    # -- rows that run ---------------------------------------------------------------------------

    def relieve(self, now: float, choose_proposers: Callable[[Sequence], None]) -> None:
        """Make room for the next plan's rows and a queued sequence of higher priority, before
        stores. `choose_proposers` decides drafting."""
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
        """Bound of the engine's buffers in this step; None while memory is plentiful."""
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
        # Rows that this plan drops count: stores precede drops.
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
        return [row for row in self.batch.rows.values() if not row.dropped]

    def _fit(self, rows: list[Sequence], limit: int, now: float) -> None:
        """Evict cached blocks, then preempt rows, until the rows fit into the limit."""
        # Unused blocks go first, least recently used; then blocks that running rows have stored,
        # except the copy of the next row to be preempted; then rows, of the lowest priority the
        # youngest first; never the last row.
        rows.sort(key=_kept_longest)
        excess = self._evict(rows[:-1], self.row_bytes + self.cache.bytes - limit)
        while excess > 0 and len(rows) > 1:
            excess -= self._preempt(rows.pop(), now, "memory")
        if excess > 0:
            self._evict(rows, excess)

    def _evict(self, rows: Ordered[Sequence], nbytes: int) -> int:
        """Returns the bytes still missing."""
        nbytes -= self.cache.evict(max(0, nbytes))
        for row in rows:
            if nbytes <= 0:
                break
            self.cache.release(row)
            nbytes -= self.cache.evict(nbytes)
        return nbytes

    def _preempt(self, row: Sequence, now: float, reason: WaitReason) -> int:
        """Returns the freed bytes."""
        before = self.row_bytes
        self.preemption.preempt(row, now, reason)
        self.counters.add(preemptions=1)
        self._count(self._rows())
        return before - self.row_bytes

    def _make_way(self, first: Sequence, limit: int, now: float) -> None:
        """Preempt rows of lower priority if that lets `first` enter."""
        # For memory alone: if all rows are in use, `first` waits, as in vLLM.
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
            self._preempt(lower.pop(), now, "priority")

    def _has_room(self, rows: CountedRows, entering: Sequence, limit: int) -> bool:
        """Whether a sequence may enter. Nearly full device memory allows only an empty batch."""
        if not rows.lengths:
            return True
        return not self.budget.memory.latest.under_pressure and self.budget.admits(
            rows, entering, limit
        )

    # -- rows that enter -------------------------------------------------------------------------

    def admits(self, sequence: Sequence, *, idle: bool) -> bool:
        """Whether a sequence fits once cached blocks are evicted. An empty batch takes any."""
        # After a failed allocation nothing may be in flight (`idle`), so that a second failure
        # costs no other row.
        limit = self.budget.limit_bytes
        if limit is None:
            return True
        if not self.row_bytes:
            return idle or self.budget.allocations.bound_bytes is None
        return self.budget.admits(self._counted, sequence, limit)

    def enter(self, sequence: Sequence, found: Found) -> Found | None:
        """Make room, sparing blocks to restore. Returns the prefix to restore, or None if the
        sequence must wait."""
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
    return row.priority, row.arrived_at, row.id
