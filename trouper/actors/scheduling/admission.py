"""Admission of waiting sequences, with prompt prefixes from the cache.

A lookup has a fixed order. Scored and embedded requests bypass the cache. A waiting sequence keeps
waiting. Then the tree is matched, and the disk is asked, once, if more tokens are on disk than a
primary computes: the disk needs no engine step. Only then may the sequence wait for a primary, if
the wait saves more than its cost. Otherwise the sequence is admitted with the match.
"""

from __future__ import annotations

import attrs

from trouper.actors.scheduling.crash_attribution import Blame
from trouper.actors.scheduling.disk_tier import DiskTier
from trouper.actors.scheduling.draft_estimates import UNCHOSEN
from trouper.actors.scheduling.image_identity import engine_tokens
from trouper.actors.scheduling.image_items import ImageItems
from trouper.actors.scheduling.kv_memory import KvMemory
from trouper.actors.scheduling.preemption import BatchYielding
from trouper.actors.scheduling.prefill_budget import PrefillBudget, free_rows
from trouper.actors.scheduling.prefix_cache import Found, PrefixCache
from trouper.actors.scheduling.running_batch import RunningBatch
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.speculation_policy import Speculation
from trouper.actors.scheduling.step_statistics import SchedulerCounters
from trouper.actors.scheduling.tenant_shares import TenantShares
from trouper.actors.scheduling.waiting_queue import WaitingQueue
from trouper.protocol.model import ModelCard
from trouper.protocol.plans import Admit, ProposerName, Restore
from trouper.protocol.replies import Progress
from trouper.protocol.settings import Settings
from trouper.protocol.waits import WaitReason


@attrs.define(kw_only=True, eq=False)
class Admission:
    queue: WaitingQueue
    batch: RunningBatch
    cache: PrefixCache
    disk: DiskTier
    blame: Blame
    kv_memory: KvMemory
    prefill_budget: PrefillBudget
    speculation: Speculation
    counters: SchedulerCounters
    card: ModelCard
    settings: Settings
    images: ImageItems
    shares: TenantShares
    yielding: BatchYielding = attrs.field(init=False)
    handled: Sequence | None = attrs.field(default=None, init=False)
    """Suspect of a crash during admission."""

    @yielding.default
    def _make_yielding(self) -> BatchYielding:
        return BatchYielding(self.kv_memory.preemption, self.counters, self.settings)

    def admit(self, *, under_pressure: bool, idle: bool, now: float) -> tuple[Admit, ...]:
        """Admit sequences as rows and memory allow. `under_pressure`: device memory is nearly full.
        `idle`: no plan is in flight."""
        # The first sequence without room ends admission: shorter prompts must not overtake a long
        # one for ever. One whose tenant has its share of rows does not end admission.
        if not self.queue:
            return ()
        prefilling = len(self.batch.prefilling)
        free = free_rows(
            self.batch.num_rows,
            prefilling,
            self.settings.rows,
            self.settings.prefill_batch_size,
            under_pressure,
        )
        admits: list[Admit] = []
        if free:
            blocked = self._admit_candidates(admits, free, idle=idle, now=now)
        else:
            blocked = "memory" if under_pressure else "rows"
        self.handled = None
        self.kv_memory.bound_cache()
        for sequence in self.queue:
            sequence.wait_for_admission(blocked if self._has_share(sequence) else "share")
        return tuple(admits)

    def _admit_candidates(
        self, admits: list[Admit], free: int, *, idle: bool, now: float
    ) -> WaitReason:
        """Add to `admits`. Returns why the remaining sequences wait, as far as they could enter."""
        for sequence in self.queue.candidates(self.batch, self.blame, idle=idle, now=now):
            if len(admits) == free:
                return "rows"
            if not self.yielding.admits(sequence, now):
                return "priority"
            if not self._has_share(sequence):
                continue
            self.handled = sequence
            self.choose_proposers(sequence)
            if not self.kv_memory.admits(sequence, idle=idle and not admits):
                return "memory"
            found = self._look_up(sequence)
            if found is None:
                continue
            found = self.kv_memory.enter(sequence, found)
            if found is None:
                return "memory"
            self.queue.enter(sequence, now)
            admits.append(self._enter(sequence, found, now))
        return "trial"  # All candidates entered or wait for a prefix or the disk.

    def _has_share(self, sequence: Sequence) -> bool:
        return self.shares.admits(sequence) or sequence.standing.isolated

    def _look_up(self, sequence: Sequence) -> Found | None:
        """The prefix to restore; None: the sequence waits, for the disk or a primary. Scored and
        embedded requests bypass the cache."""
        request = sequence.request
        is_scored = request.prompt_logprobs is not None and not sequence.num_output_tokens
        if is_scored or request.embed:
            return self.cache.nothing(sequence.chain)
        if not sequence.is_ready:
            return None
        found = self.cache.look(sequence.chain, sequence.spans)
        if self._reads(sequence, found):
            return None
        until = None if found.primary is None else self._waits_until(sequence, found, found.primary)
        if found.primary is None or until is None:
            return found if found.tokens >= self.card.min_restored_tokens else found.unused
        if sequence.primary is None:
            self.cache.waits()
        sequence.wait_for_prefix(found.primary, until)
        self.cache.wait_for(found.primary, until)
        return None

    def _reads(self, sequence: Sequence, found: Found) -> bool:
        """Order a read from disk, once, if worth more than the primary."""
        # A suspect does not wait for a disk, which may hang: nobody else runs meanwhile.
        if (
            sequence.read is not None
            or found.missing_tokens <= found.gain
            or sequence.standing.suspect
        ):
            return False
        if found.tokens + found.missing_tokens < self.card.min_restored_tokens:
            return False
        read = self.disk.load(found, self.prefill_budget.prefill_rate)
        if read is not None:
            sequence.wait_for_disk(read)
        return read is not None

    def _waits_until(self, sequence: Sequence, found: Found, primary: Sequence) -> int | None:
        """Number of tokens up to which a wait for the primary pays, if any."""
        worth = self._worth_waiting()
        if found.gain >= worth:
            return found.until
        pause = max(found.tokens, primary.last_boundary(found.until))
        gain = found.until - pause
        if (
            gain * self.queue.count_sharing(sequence, found.until, -(-worth // max(1, gain)))
            >= worth
        ):
            return found.until
        return pause if pause > found.tokens else None

    def _worth_waiting(self) -> int:
        """Tokens whose prefill takes as long as a wait's pass."""
        return max(
            self.settings.block_size,
            int(self.prefill_budget.decode_s * self.prefill_budget.prefill_rate),
        )

    def _enter(self, sequence: Sequence, found: Found, now: float) -> Admit:
        self.batch.add(sequence)
        # What is embedded once is hardly ever continued: its blocks would only take others' place.
        restore = None if sequence.request.embed else self.cache.enter(sequence, found)
        sequence.num_unscheduled_tokens -= found.tokens
        if sequence.client.images:
            self.images.need(sequence)
        if sequence.started:
            sequence.client.report(Progress(now))
        else:
            sequence.start(found.tokens, now)
            self.counters.add(
                total_cached_tokens=found.tokens, total_prompt_tokens=sequence.num_prompt_tokens
            )
        return self._projection(sequence, restore)

    def _projection(self, sequence: Sequence, restore: Restore | None) -> Admit:
        request = sequence.request
        return Admit(
            row=sequence.id,
            prompt=engine_tokens(sequence.chain.tokens, sequence.client.images),
            sampling=request.sampling,
            logprobs=request.logprobs,
            logprob_tokens=request.logprob_tokens,
            restore=restore,
            grammar=request.grammar,
            min_tokens=request.min_tokens,
            ends=tuple(sorted(sequence.output.ends)) if request.min_tokens else (),
            prompt_logprobs=None if sequence.num_resumed_tokens else request.prompt_logprobs,
            thinking=sequence.client.thinking,
            breakers=sequence.client.breakers,
            logits_processors=request.logits_processors,
            adapter=request.adapter,
            embed=self.card.pooling if request.embed else None,
            second_at=sequence.client.second_at,
            drafts="ngram" in sequence.records,
            num_output_tokens=sequence.num_resumed_tokens,
            media=sequence.spans,
        )

    def choose_proposers(self, sequence: Sequence) -> None:
        """Choose a sequence's drafting before entry, as drafts take memory of all rows."""
        # A draft model rests where the row would outgrow its context.
        # Chosen once: a sequence may wait for memory through many plans.
        if sequence.records is not UNCHOSEN:
            return
        sequence.records = self.speculation.records(self._proposers(sequence))
        if (
            record := sequence.records.get("draft_model")
        ) is not None and self.card.draft_context is not None:
            longest = sequence.num_prompt_tokens + sequence.max_tokens - 1
            record.undrafted = max(0, longest - self.card.draft_context)

    def _proposers(self, sequence: Sequence) -> list[ProposerName]:
        request, card, shown = sequence.request, self.card, bool(sequence.spans)
        wish = request.speculation or self.settings.speculation
        if request.embed or card.no_drafts or wish == "off":
            return []
        if shown and not card.capabilities.allows("images_drafts"):
            return []
        # A draft model sees no images: it would draft what the text alone suggests.
        drafts_by_model = card.draft_model is not None and not shown
        possible: dict[ProposerName, bool] = {
            "ngram": wish == "ngram" or (wish == "auto" and card.drafts_by_default),
            "draft_model": wish in ("auto", "draft_model") and drafts_by_model,
            "mtp": wish in ("auto", "mtp") and not card.no_mtp,
        }
        return [name for name, chosen in possible.items() if chosen]
