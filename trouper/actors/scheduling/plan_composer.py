from __future__ import annotations

from collections.abc import Iterable

import attrs

from trouper.actors.scheduling.admission import Admission
from trouper.actors.scheduling.disk_tier import DiskTier
from trouper.actors.scheduling.kv_memory import KvMemory
from trouper.actors.scheduling.preemption import RowReclaiming
from trouper.actors.scheduling.prefill_budget import PrefillBudget, round_chunk, take_turns
from trouper.actors.scheduling.prefix_cache import PrefixCache
from trouper.actors.scheduling.result_commit import ResultCommit
from trouper.actors.scheduling.running_batch import RunningBatch
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.speculation_policy import Speculation
from trouper.actors.scheduling.tenant_shares import TenantShares
from trouper.protocol.health import MemoryStatus
from trouper.protocol.plans import NO_ROW, Chunk, Load, Plan, RowId, Store
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch


@attrs.define(kw_only=True, eq=False)
class PlanComposer:
    admission: Admission
    batch: RunningBatch
    cache: PrefixCache
    disk: DiskTier
    kv_memory: KvMemory
    commit: ResultCommit
    shares: TenantShares
    reclaiming: RowReclaiming
    prefill_budget: PrefillBudget
    speculation: Speculation
    memory: Watch[MemoryStatus]
    settings: Settings
    prefill_together: bool
    chunk_step: int = 1
    loads: list[Load] = attrs.field(factory=list)
    """Blocks read from disk, for the next plan."""
    # The last row that prefilled in a pass of its own.
    _last_lone: RowId = NO_ROW
    _memory_seen: MemoryStatus = attrs.field(
        default=attrs.Factory(lambda self: self.memory.latest, takes_self=True)
    )
    _releases_seen: int = attrs.field(
        default=attrs.Factory(lambda self: self.memory.latest.releases, takes_self=True)
    )

    def compose(self, step: int, *, idle: bool, now: float) -> Plan:
        """Compose one step's plan: every row that can decode does, and prefill gets the rest of the
        stall bound (chunked prefill, as in Sarathi-Serve and vLLM).

        The order matters. Memory pressure is relieved before any use of the cache. Rows of batches
        yield, then rows beyond a tenant's share, before rows are counted. Rows and cached blocks
        are fitted into memory before any store: preempted rows are stored like others that leave.
        Stores precede admission, which must not promise that room, and drops. Admitted sequences
        prefill in this step. Drafts precede the count of decoded tokens. The next plan drops a row
        whose last token is scheduled here. Evictions are collected last, since all earlier steps
        may evict.
        """
        self._relieve_pressure()
        self.admission.yielding.yield_rows(now)
        self.reclaiming.reclaim_rows(now)
        self.kv_memory.relieve(now, self.admission.choose_proposers)
        loads, self.loads = tuple(self.loads), []
        stores = self._stores()
        drops = self.batch.take_drops()
        under_pressure = self.memory.latest.under_pressure
        admits = self.admission.admit(under_pressure=under_pressure, idle=idle, now=now)
        decoding = self.batch.decoding
        chunks = self._chunks(decoding)
        self.shares.note_prefill(step, chunks, self.batch.rows)
        allowed = self.speculation.allow(decoding)
        for sequence, num_draft_tokens in zip(decoding, allowed.drafts, strict=False):
            sequence.num_draft_tokens += num_draft_tokens
        self._schedule(decoding, chunks)
        kv_bound = self.kv_memory.bound_buffers()
        evicted = self.cache.freed()
        persist, persist_as = self.disk.pick()
        return Plan(
            step,
            drop=drops,
            admit=admits,
            decode=tuple(sequence.id for sequence in decoding),
            prefill=chunks,
            release_memory=self._release_memory(),
            evict=evicted,
            store=stores,
            load=loads,
            persist=persist,
            persist_as=persist_as,
            settled=self.disk.settled(),
            drafts=allowed.drafts,
            proposers=allowed.proposers,
            watch=allowed.watch,
            kv_bound=kv_bound,
        )

    def _schedule(self, decoding: Iterable[Sequence], chunks: Iterable[Chunk]) -> None:
        for sequence in decoding:
            if sequence.schedule_token():
                self.batch.drop(sequence)
        for chunk in chunks:
            sequence = self.batch.rows[chunk.row]
            if sequence.schedule_chunk(chunk.tokens):
                self.batch.drop(sequence)
            self.commit.to_store[chunk.row] = sequence

    def _stores(self) -> tuple[Store, ...]:
        stores: list[Store] = []
        for sequence in self.commit.take_to_store():
            stores += self.cache.computed(sequence)
        for sequence in self.batch.dropping:
            stores += self.cache.leave(sequence)
        return tuple(stores)

    def _chunks(self, decoding: list[Sequence]) -> tuple[Chunk, ...]:
        prefilling = self.shares.may_prefill(self.batch.prefilling, decoding)
        if not prefilling:
            return ()
        work = self.prefill_budget.turn({sequence.work for sequence in prefilling})
        remaining = [
            (sequence.id, sequence.next_chunk) for sequence in prefilling if sequence.work == work
        ]
        requested = sum(tokens for _, tokens in remaining)
        budget = self.prefill_budget.budget(requested, busy=bool(decoding), work=work)
        if work != "text" or not self.prefill_together:
            remaining = take_turns(remaining, budget, self._last_lone)
            self._last_lone = remaining[-1][0]
        max_tokens = self.settings.prefill_step_size
        chunks = self.shares.share_prefill(remaining, self.batch.rows, budget, max_tokens)
        if self.chunk_step > 1:
            chunks = tuple(map(self._round, chunks))
        self.prefill_budget.plan(work, limited=sum(chunk.tokens for chunk in chunks) < requested)
        return chunks

    def _round(self, chunk: Chunk) -> Chunk:
        sequence = self.batch.rows[chunk.row]
        if chunk.tokens == sequence.next_chunk:
            return chunk
        return Chunk(
            chunk.row, round_chunk(sequence.num_computed_tokens, chunk.tokens, self.chunk_step)
        )

    def _relieve_pressure(self) -> None:
        memory = self.memory.latest
        if memory.under_pressure and memory is not self._memory_seen:
            self.cache.evict(
                max(
                    0, int(memory.active_bytes - memory.limit_bytes * self.settings.memory_fraction)
                )
            )
        self._memory_seen = memory

    def _release_memory(self) -> bool:
        """True once for each order of the janitor."""
        ordered = self.memory.latest.releases
        release, self._releases_seen = ordered != self._releases_seen, ordered
        return release
