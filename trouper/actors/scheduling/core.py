"""The scheduler's core decides, and neither waits nor sends. No Trio, no MLX.

`schedule(now)` composes the next plan, stage by stage; `update(stepped, now)` takes the oldest
plan's result. In between come requests (`enqueue`), reads from disk (`hear`), decoded images
(`hear_image`), the end of intake (`close`), and `drop_aborted`.

Plans run ahead: as many as PLANS_IN_FLIGHT have no result yet. A composed plan counts its tokens as
scheduled and computed; `update` commits the tokens that the engine sampled, and an answer may end
there, by a stop token. A sequence whose last token is scheduled stays in `RunningBatch.rows` until
that token is committed, though the next plan drops the row in the engine. A sequence that is
removed (preempted, aborted, failed) leaves `rows` at once, and its tokens in flight are discarded.
A preempted one returns in another row and samples them again, with the same result: a draw depends
on the seed and the token's position alone.

A suspect is a sequence that ran in a step that crashed the engine (`crash_attribution.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import count

import attrs
import numpy as np

from trouper.actors.scheduling.admission import Admission
from trouper.actors.scheduling.batch_view import BatchView
from trouper.actors.scheduling.core_edges import CoreWatches, DiskSeam, send_nowhere
from trouper.actors.scheduling.crash_handover import CrashHandover
from trouper.actors.scheduling.crash_recovery import Recovery
from trouper.actors.scheduling.disk_tier import DiskTier
from trouper.actors.scheduling.image_identity import cached_tokens
from trouper.actors.scheduling.image_items import ImageItems
from trouper.actors.scheduling.kv_memory import KvMemory, MemoryBudget
from trouper.actors.scheduling.preemption import Preemption, RowReclaiming
from trouper.actors.scheduling.prefill_budget import PrefillBudget, round_chunk, take_turns
from trouper.actors.scheduling.prefix_cache import PrefixCache
from trouper.actors.scheduling.prepared_request import PreparedRequest, failing_client
from trouper.actors.scheduling.result_commit import ResultCommit
from trouper.actors.scheduling.running_batch import RunningBatch
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.speculation_policy import Allowed, Speculation
from trouper.actors.scheduling.step_statistics import SchedulerCounters, StepStatistics
from trouper.actors.scheduling.tenant_shares import TenantShares
from trouper.actors.scheduling.waiting_queue import WaitingQueue
from trouper.protocol.media import DecodeImage, ImageDecoded
from trouper.protocol.model import LoadedModel
from trouper.protocol.plans import (
    NO_ROW,
    PLANS_IN_FLIGHT,
    Admit,
    Chunk,
    Encode,
    Load,
    Plan,
    RowId,
    Stepped,
    Store,
)
from trouper.protocol.problems import RESTART_S, Problem, queue_full, rank_lost
from trouper.protocol.sampling import Sampling
from trouper.protocol.settings import Settings
from trouper.protocol.work import DiskNews


class Core:
    """`recovery` takes the sequences that a crash leaves; without one, all end."""

    def __init__(
        self,
        model: LoadedModel,
        namespace: str,
        settings: Settings,
        *,
        watches: CoreWatches,
        disk: DiskSeam,
        recovery: Recovery | None = None,
        order_image: Callable[[DecodeImage], object] = send_nowhere,
    ) -> None:
        """`namespace`: hex digits that differ wherever KV would. `order_image`: sends to the
        ImageDecoder, and never blocks."""
        self._watches, self._settings, self._tokenizer = watches, settings, model.tokenizer
        self._carries_over = recovery is not None
        self._recovery = recovery or Recovery()
        self._open = not self._recovery.closed
        self._now = 0.0
        self._steps = count()
        self._unanswered: deque[Plan] = deque()
        self._proving = False
        # Blocks read from disk, for the next plan.
        self._loads: list[Load] = []
        # The last row that prefilled in a pass of its own, where rows cannot prefill together.
        self._last_lone: RowId = NO_ROW
        self._make_policies(model, namespace, disk)
        self._images = ImageItems.of(
            model.card.images, settings, order_image, self._recovery.image_ids, self._counters
        )
        self._make_stages(model)

    def _make_policies(self, model: LoadedModel, namespace: str, disk: DiskSeam) -> None:
        watches, settings, latest = self._watches, self._settings, self._watches.stats.latest
        self._cache = PrefixCache.of(model.card, namespace, settings, latest.cache)
        self._cache.saves = settings.blocks_dir is not None
        self.disk = DiskTier(
            disk.send,
            watches.directory,
            disk.known,
            self._cache,
            lambda: self._now,
            answer_s=disk.answer_s,
        )
        stats = attrs.evolve(latest.speculation, reason=model.card.no_drafts)
        self._speculation = Speculation(settings.spec_draft_tokens, settings.spec_ngram_min, stats)
        self._prefill_budget = PrefillBudget.of(settings, model.card.chunk_step)
        self._counters = SchedulerCounters(watches.stats)
        self._step_statistics = StepStatistics.of(latest)
        self._batch_view = BatchView(watches.last_viewed_at, watches.batch)

    def _make_stages(self, model: LoadedModel) -> None:
        self._shares = TenantShares(self._settings.rows)
        self._queue = WaitingQueue(self._shares, self._settings.priority_max_wait_s)
        self._batch = RunningBatch(self._counters, self._shares)
        self._preemption = Preemption(queue=self._queue, batch=self._batch)
        self._budget = MemoryBudget.of(
            model.card, self._settings, self._watches, self._recovery.allocations
        )
        self._kv_memory = KvMemory(
            budget=self._budget,
            batch=self._batch,
            cache=self._cache,
            preemption=self._preemption,
            counters=self._counters,
        )
        self._admission = Admission(
            queue=self._queue,
            batch=self._batch,
            cache=self._cache,
            disk=self.disk,
            blame=self._recovery.blame,
            kv_memory=self._kv_memory,
            prefill_budget=self._prefill_budget,
            speculation=self._speculation,
            counters=self._counters,
            card=model.card,
            settings=self._settings,
            images=self._images,
            shares=self._shares,
        )
        self._handover = CrashHandover(
            recovery=self._recovery,
            queue=self._queue,
            batch=self._batch,
            cache=self._cache,
            counters=self._counters,
            preemption=self._preemption,
        )
        self._commit = ResultCommit(
            queue=self._queue,
            batch=self._batch,
            cache=self._cache,
            handover=self._handover,
            counters=self._counters,
        )
        self._reclaiming = RowReclaiming(self._shares, self._preemption, self._counters)
        self._prefill_together = model.card.capabilities.allows("prefill_together")
        self._chunk_step = model.card.chunk_step

    @property
    def accepts(self) -> bool:
        return self._open

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def awaits_image(self) -> bool:
        """Whether an image's pixels were ordered."""
        return self._images.busy

    @property
    def plans_in_flight(self) -> int:
        return len(self._unanswered)

    # -- after a crash ---------------------------------------------------------------------------

    @property
    def must_prove_engine(self) -> bool:
        """Whether `proof` comes first, after a crash."""
        return self._recovery.crashed

    def take_up(self, now: float) -> None:
        self._handover.take_up(now)

    def proof(self, now: float) -> tuple[Plan, ...]:
        """Plans for a prompt token without a client; `proved` takes each answer."""
        # If the engine fails at that, no request is to blame.
        self._proving, self._now = True, now
        row, prompt = self._batch.next_id(), np.zeros(1, "<i4").tobytes()
        admit = Admit(row, prompt, Sampling(temperature=0))
        plans = (
            Plan(next(self._steps), admit=(admit,), prefill=(Chunk(row, 1),)),
            Plan(next(self._steps), drop=(row,)),
        )
        self._unanswered += plans
        return plans

    def proved(self, stepped: Stepped) -> None:
        assert self._unanswered.popleft().step == stepped.step
        if not self._unanswered:
            self._proving = self._recovery.crashed = False

    # -- requests --------------------------------------------------------------------------------

    def enqueue(self, client: PreparedRequest, now: float) -> None:
        """Queue a request, or refuse one that crashes the engine, meets a full queue, or can never
        fit. The prefix cache is matched later, at admission."""
        # RequestIntake has tokenized the prompt, compiled the grammar and read the images' sizes.
        self._counters.add(total_requests=1)
        blame, interval = self._recovery.blame, self._settings.stream_interval
        with failing_client(client, self._counters):
            tokens = cached_tokens(client.prompt, client.images)
            chain = self._cache.chain(tokens, client.request.cache_salt, client.request.cache_scope)
            standing = self._recovery.standing(client, tokens, now)
            sequence = Sequence.of(
                client, standing, self._tokenizer, chain, now, stream_interval=interval
            )
        if blame.refuses(standing, now):
            self._handover.refuse(sequence, now)
            return
        free_rows = self._settings.rows - self._batch.num_rows_of_others
        if self._queue.is_full_for(client.request, self._settings.max_queue_size + free_rows):
            self._counters.add(requests_errored=1)
            sequence.fail(queue_full(self._settings.max_queue_size, self._queue.half_s(now)))
            return
        if problem := self._budget.restrict(sequence):
            self._counters.add(requests_errored=1)
            sequence.fail(problem)
            return
        client.accept(sequence.max_tokens)
        self._queue.append(sequence)

    def close(self) -> None:
        self._open = False

    def hear(self, news: DiskNews, now: float) -> None:
        self._now = now
        self._loads += self.disk.hear(news)

    def hear_image(self, decoded: ImageDecoded, now: float) -> None:
        self._now = now
        self._commit.unusable(self._images.hear(decoded))

    def drop_aborted(self, now: float) -> None:
        """Drop aborted requests within one step: queued, prefilling or decoding (D4)."""
        # A suspect is tried to its end: else a client that leaves early could crash the engine
        # again and again.
        self._now = now
        aborted = self._queue.remove_aborted()
        for sequence in aborted:
            if (read := sequence.read) is not None:
                self.disk.forget(read.number)
            sequence.finish()
        if aborted:
            self._counters.add(requests_withdrawn=len(aborted))
        for sequence in [row for row in self._batch.rows.values() if row.client.aborted]:
            if not sequence.standing.suspect:
                self._batch.abort(sequence)

    def fail_all(self, problem: Problem) -> None:
        """Send exactly one terminal event to every remaining request."""
        queued = tuple(self._queue)
        for sequence in queued:
            sequence.fail(problem)
        self._queue.clear()
        self._counters.add(requests_errored=self._batch.fail_all(problem) + len(queued))
        self.publish()

    def end(self, now: float) -> None:
        """Hand the remaining sequences to the next scheduler, or fail them."""
        self._now = now
        if not self._carries_over:
            self.fail_all(self._end_problem())
            return
        self._handover.leave(
            self._unanswered,
            self._commit.handled,
            self._admission.handled,
            proving=self._proving,
            closed=not self._open,
            problem=self._end_problem(),
            used_bytes=self._kv_memory.row_bytes + self._cache.bytes,
            now=now,
        )
        self.publish()

    def _end_problem(self) -> Problem:
        """503 at shutdown, 500 after a crash of the engine."""
        if lost := self._watches.ranks.latest.lost:
            return rank_lost(lost)
        message = "the engine stopped before the answer was complete"
        status, retry_s = (
            (503, RESTART_S) if self._watches.draining.latest or not self._open else (500, None)
        )
        return Problem(
            status, message, "server_error", None, code="engine_stopped", retry_after_s=retry_s
        )

    # -- plans -----------------------------------------------------------------------------------

    def schedule(self, now: float) -> Plan | None:
        """The next plan, to be sent at once; None without work or with PLANS_IN_FLIGHT unanswered
        plans."""
        self._now = now
        if len(self._unanswered) == PLANS_IN_FLIGHT:
            return None
        self.disk.give_up_silent()
        plan = self._compose(next(self._steps), idle=not self._unanswered, now=now)
        # The engine may keep a step's result until the next plan arrives: an empty plan brings the
        # last one.
        flushes = bool(self._unanswered) and self._unanswered[-1].has_work
        if not (plan.has_work or plan.changes or flushes):
            return None
        plan = self._step_statistics.request_banks(plan, now)
        self._unanswered.append(plan)
        return plan

    def _compose(self, step: int, *, idle: bool, now: float) -> Plan:
        """Compose one step's plan: every row that can decode does, and prefill gets as many tokens
        as `--decode-stall-ms` leaves time for (chunked prefill, as in Sarathi-Serve and vLLM).

        The order matters, and is not the one in which the engine carries a plan out (`Plan`). Room
        is made before anything is counted. Stores precede drops and admission. Admitted sequences
        prefill in this step. Drafts are counted before tokens. Evictions are collected last.
        """
        self._make_room(now)
        loads, self._loads = tuple(self._loads), []
        # Before drops: `take_drops` empties the list of leaving rows. Before admission, which must
        # not promise the memory that stores take.
        stores = self._stores()
        drops = self._batch.take_drops()
        under_pressure = self._watches.memory.latest.under_pressure
        admits = self._admission.admit(under_pressure=under_pressure, idle=idle, now=now)
        decoding, prefilling = self._batch.decoding, self._batch.prefilling
        with_credit = self._shares.may_prefill(prefilling, decoding)
        self._images.keep_up(prefilling, with_credit, self._budget.limit_bytes)
        ready = self._images.ready_to_prefill(with_credit)
        encode = self._images.encode(with_credit, busy=bool(decoding), others_prefill=bool(ready))
        # Where rows decode, an encoder's slice and chunks take turns (`ImageItems.encode`): each
        # alone keeps within --decode-stall-ms.
        chunks = () if encode and decoding else self._chunks(ready, busy=bool(decoding))
        encoded_for = _first_that_needs(encode, with_credit)
        self._shares.note_work(step, chunks, encoded_for, self._batch.rows)
        # Before tokens are scheduled: how far a row may draft follows from its tokens so far.
        allowed = self._count_drafts(decoding)
        # A row whose last token is scheduled here is dropped by the next plan.
        self._schedule_tokens(decoding, chunks)
        kv_bound = self._kv_memory.bound_buffers()
        # Last, since all stages before may evict.
        evicted = self._cache.freed()
        persist, persist_as = self.disk.pick()
        return Plan(
            step,
            drop=drops,
            admit=admits,
            decode=tuple(sequence.id for sequence in decoding),
            prefill=chunks,
            encode=encode,
            forget=self._images.take_forgotten(),
            release_memory=self._kv_memory.take_release(),
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

    def _make_room(self, now: float) -> None:
        """Evict and preempt until the next step fits. A preempted sequence goes to the front of the
        queue; `_stores` keeps its KV as cached blocks, as of other rows that leave."""
        self._budget.image_bytes = self._images.nbytes
        # Memory of the device, before any use of the cache.
        self._kv_memory.relieve_pressure()
        # Rows of batch requests while other requests run or wait.
        self._admission.yielding.yield_rows(now)
        # Rows beyond a tenant's share while another tenant waits.
        self._reclaiming.reclaim_rows(now)
        # Memory of rows and cached blocks, once rows have left for other reasons, and for a queued
        # sequence of higher priority, with its drafts.
        self._kv_memory.relieve(now, self._admission.choose_proposers)

    def _stores(self) -> tuple[Store, ...]:
        """Choose what the prefix cache keeps of computed tokens: blocks that rows have filled, and
        of rows that leave the rest, too."""
        stores: list[Store] = []
        for sequence in self._commit.take_to_store():
            stores += self._cache.computed(sequence)
        for sequence in self._batch.dropping:
            stores += self._cache.leave(sequence)
        return tuple(stores)

    def _chunks(self, ready: list[Sequence], *, busy: bool) -> tuple[Chunk, ...]:
        """Share the step's prefill tokens between rows of one kind of work: answers, scores or
        embeddings, which run different passes, in turns. Each chosen row gets at least one token,
        and at most `next_chunk`: up to the prompt's end, a snapshot, or an image without
        vectors. An atomic span is never split, whatever the budget says."""
        if not ready or (busy and self._prefill_budget.must_look()):
            return ()
        work = self._prefill_budget.turn({sequence.work for sequence in ready})
        of_this_work = [sequence for sequence in ready if sequence.work == work]
        remaining = [(sequence.id, sequence.next_chunk) for sequence in of_this_work]
        requested = sum(tokens for _, tokens in remaining)
        context = max(sequence.num_computed_tokens for sequence in of_this_work)
        budget = self._prefill_budget.budget(requested, busy=busy, work=work, context=context)
        if work != "text" or not self._prefill_together:
            # Each row takes a pass of its own, so a few rows take the step, in turns.
            remaining = take_turns(remaining, budget, self._last_lone)
            self._last_lone = remaining[-1][0]
        max_tokens = self._settings.prefill_step_size
        chunks = self._shares.share_prefill(remaining, self._batch.rows, budget, max_tokens)
        if self._chunk_step > 1:
            chunks = tuple(map(self._round, chunks))
        rows = self._batch.rows
        chunks = end_outside_images(chunks, rows)
        limited = sum(chunk.tokens for chunk in chunks) < requested
        chunks = tuple(_with_images(chunk, rows[chunk.row]) for chunk in chunks)
        end = max(rows[chunk.row].num_computed_tokens + chunk.tokens for chunk in chunks)
        self._prefill_budget.plan(work, limited=limited, end=end)
        return chunks

    def _round(self, chunk: Chunk) -> Chunk:
        """Shorten a chunk within `next_chunk` to a length that recurs."""
        sequence = self._batch.rows[chunk.row]
        if chunk.tokens == sequence.next_chunk:
            return chunk
        computed = sequence.num_computed_tokens
        return Chunk(chunk.row, round_chunk(computed, chunk.tokens, self._chunk_step))

    def _schedule_tokens(self, decoding: Iterable[Sequence], chunks: Iterable[Chunk]) -> None:
        """Count the tokens of this plan as computed. A prompt's last chunk samples a token, too."""
        # True: the last token that max_tokens allows is scheduled.
        for sequence in decoding:
            if sequence.schedule_token():
                self._batch.drop(sequence)  # By the next plan; `rows` keep it until its token.
        for chunk in chunks:
            sequence = self._batch.rows[chunk.row]
            if sequence.schedule_chunk(chunk.tokens):
                self._batch.drop(sequence)
            self._commit.store_later(sequence)

    # -- results ---------------------------------------------------------------------------------

    def stalled(self, since: float) -> None:
        self._counters.stalled(since)

    def update(self, stepped: Stepped, now: float) -> None:
        """Take the result of the oldest plan, with that plan's tokens. Tokens of rows that have
        left meanwhile are discarded."""
        self._now = now
        plan = self._unanswered.popleft()
        assert plan.step == stepped.step, f"plan {plan.step} was answered by step {stepped.step}"
        self._counters.answered()
        self._commit.unusable(self._images.answered(plan, stepped))
        if plan.encode:
            without_encoder = attrs.evolve(stepped, seconds=stepped.seconds - stepped.encode_s)
            self._prefill_budget.answered(plan, without_encoder)
        else:
            self._prefill_budget.answered(plan, stepped)
        self._shares.charge(plan, stepped, self._prefill_budget.decode_s)
        self.disk.persisted(stepped.persisted)
        # First, so that a suspect that has ended is acquitted before others' results.
        self._commit.drops(plan, now)
        # Progress of prefill.
        self._commit.chunks(plan, now)
        # Before tokens are committed, since each accepted draft is counted there.
        self._settle_drafts(plan, stepped)
        # Log-probabilities of prompts, embeddings, failures of rows.
        self._commit.results(stepped, now)
        decoding = sum(map(self._batch.rows.__contains__, plan.decode))
        committed = self._commit.tokens(stepped, now)
        self._batch_view.stepped(now, decoded=bool(plan.decode), produced=bool(stepped.rows))
        prefilled = sum(chunk.tokens for chunk in plan.prefill)
        is_shared = bool(plan.decode and prefilled)
        self._step_statistics.stepped(stepped, now, decoding=decoding, tokens=committed + prefilled)
        self._counters.add(
            steps=int(plan.has_work),
            step_seconds=stepped.seconds if plan.has_work else 0.0,
            shared_steps=int(is_shared),
            shared_step_seconds=stepped.seconds if is_shared else 0.0,
            tokens_generated=committed,
            total_prefill_tokens=prefilled,
        )

    def _count_drafts(self, decoding: list[Sequence]) -> Allowed:
        """Decide how many tokens each row may draft. The engine proposes and verifies them in the
        step; until its result, memory counts all as computed."""
        allowed = self._speculation.allow(decoding)
        for sequence, num_draft_tokens in zip(decoding, allowed.drafts, strict=False):
            sequence.num_draft_tokens += num_draft_tokens
        return allowed

    def _settle_drafts(self, plan: Plan, stepped: Stepped) -> None:
        for row, num_draft_tokens in zip(plan.decode, plan.drafts, strict=False):
            if row in self._batch.rows:
                self._batch.rows[row].num_draft_tokens -= num_draft_tokens
        self._speculation.answered(plan, stepped, self._batch.rows)

    def publish(self) -> None:
        self._counters.publish(
            cache=self._cache.stats(),
            active_sequences=len(self._batch.rows),
            queued_requests=len(self._queue),
            preempted_sequences=self._queue.num_preempted,
            speculation=self._speculation.stats,
            recovery=self._recovery.look(self._now),
            kv_row_bytes=self._kv_memory.row_bytes,
            kv_limit_bytes=self._budget.limit_bytes or 0,
            prefilling_sequences=len(self._batch.prefilling),
            image_cache_bytes=self._images.nbytes,
            shared_step_bound_s=self._prefill_budget.target_s,
            decode_step_s=self._prefill_budget.decode_s,
            **self._step_statistics.gauges,
        )
        self._batch_view.show(self._batch.rows.values(), self._queue, self._now)


def _first_that_needs(orders: Iterable[Encode], rows: Iterable[Sequence]) -> Sequence | None:
    items = [order.item for order in orders]
    return next((row for row in rows if row.needs_image(items)), None) if items else None


def end_outside_images(
    chunks: Iterable[Chunk], rows: Mapping[RowId, Sequence]
) -> tuple[Chunk, ...]:
    """Let chunks end before or behind atomic spans. One row a step may get more for that than its
    share, the first; others wait at the span's start."""
    ended, exceeded = list[Chunk](), False
    for chunk in chunks:
        tokens = rows[chunk.row].uncut_chunk(chunk.tokens)
        if tokens > chunk.tokens:
            if exceeded:
                continue
            exceeded = True
        ended.append(chunk if tokens == chunk.tokens else attrs.evolve(chunk, tokens=tokens))
    return tuple(ended)


def _with_images(chunk: Chunk, sequence: Sequence) -> Chunk:
    items = sequence.items_touched(chunk.tokens)
    return attrs.evolve(chunk, items=items) if items else chunk
