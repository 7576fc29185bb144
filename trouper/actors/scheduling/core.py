"""The core of the scheduler: it decides, and neither waits nor sends. No Trio, no MLX.

`schedule(now)` composes the next plan, `update(stepped, now)` takes the answer of the oldest plan that has none. Between the two the
caller brings requests (`enqueue`), news of the disk (`hear`) and the end of requests (`close`), and calls `drop_aborted`. What
clients hear goes through their `Client`, which never blocks. Time is what the caller says.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count

import attrs
import numpy as np

from trouper.actors.scheduling.admitted import Admitted, Client
from trouper.actors.scheduling.batch_view import BatchView
from trouper.actors.scheduling.block_keys import Chain, token_bytes
from trouper.actors.scheduling.chunk_sizer import free_rows, share_chunks
from trouper.actors.scheduling.crash_attribution import Involved, Standing
from trouper.actors.scheduling.crash_isolation import may_enter
from trouper.actors.scheduling.crash_recovery import Carried, LeftBehind, Recovery, crashes_engine
from trouper.actors.scheduling.disk_tier import DiskTier, Ticket
from trouper.actors.scheduling.prefill_budget import PrefillBudget
from trouper.actors.scheduling.prefix_cache import Found, PrefixCache
from trouper.actors.scheduling.sequence import Row
from trouper.actors.scheduling.speculation_policy import Record, Speculation
from trouper.actors.scheduling.step_statistics import StepStatistics
from trouper.protocol.batch import BatchStats
from trouper.protocol.health import DirectoryStats, MemoryStatus, RanksStats, SchedulerStats
from trouper.protocol.model import LoadedModel
from trouper.protocol.plans import PLANS_IN_FLIGHT, Admit, Chunk, Load, Plan, Restore, RowId, Stepped, Store
from trouper.protocol.problems import Problem, queue_full, rank_lost
from trouper.protocol.replies import Embedded, Finished, TokenLogprobs
from trouper.protocol.requests import Generate
from trouper.protocol.sampling import Sampling
from trouper.protocol.settings import Settings
from trouper.protocol.watch import Watch
from trouper.protocol.work import DiskNews, DiskOrder

log = logging.getLogger("trouper.scheduler")


@attrs.frozen(kw_only=True, eq=False)
class CoreWatches:
    """What the core publishes, and what it looks at. A watch holds the latest value; looking at it never blocks."""

    stats: Watch[SchedulerStats]
    memory: Watch[MemoryStatus]
    directory: Watch[DirectoryStats]
    last_viewed_at: Watch[float]
    batch: Watch[BatchStats]
    ranks: Watch[RanksStats] = attrs.field(factory=lambda: Watch(RanksStats()))


@attrs.frozen(kw_only=True, eq=False)
class DiskSeam:
    """The way to SSDWriter. send: False if an order finds no room, or nobody carries it out. known: called once all that lies
    on disk is known, or that nothing does."""

    send: Callable[[DiskOrder], bool]
    known: Callable[[], object]


@attrs.define(eq=False)
class Waiting:
    """A request in the queue."""

    admitted: Admitted
    standing: Standing
    chain: Chain
    since: float
    """Time of arrival, on trio's clock."""
    row: Row | None = None
    """The row that the request had before it left the engine; it resumes."""
    primary: Row | None = None
    """Row that prefills tokens of this request's prompt; the request waits for it."""
    until: int = 0
    """Number of tokens up to which the primary must have prefilled."""
    ticket: Ticket | None = None
    """Read from disk for this request. It is ordered at most once."""

    @property
    def submission(self) -> Client:
        return self.admitted.submission

    @property
    def waits(self) -> bool:
        if self.ticket is not None and not self.ticket.done:
            return True
        return (
            self.primary is not None and self.primary.node is not None and self.primary.num_computed_tokens < self.until
        )


class Core:
    """Requests, rows, and what is known of the plans that are not answered. `recovery`: takes those who are left when the
    scheduler crashes, and gives them to the next one; None: they end with it."""

    def __init__(
        self,
        model: LoadedModel,
        namespace: str,
        settings: Settings,
        *,
        watches: CoreWatches,
        disk: DiskSeam,
        recovery: Recovery | None = None,
    ) -> None:
        """`namespace`: hex, of all that shapes KV."""
        self._watches = watches
        self._now = 0.0
        self._carries = recovery is not None
        self._recovery = recovery or Recovery()
        self._blame = self._recovery.blame
        self._tokenizer = model.tokenizer
        self._pooling = model.card.embedding.pooling if model.card.embedding else None
        self._settings = settings
        self._cache = PrefixCache.of(model.card, namespace, settings, watches.stats.latest.cache)
        self._disk = DiskTier(disk.send, watches.directory, disk.known, self._cache, lambda: self._now)
        self._cache.saves = settings.blocks_dir is not None
        stats = attrs.evolve(watches.stats.latest.speculation, reason=model.card.no_drafts)
        self._drafts = settings.speculation
        """Speculation default for requests that do not set it."""
        if self._drafts == "auto":
            self._drafts = "ngram" if model.card.drafts_by_default else "off"
        self._speculation = Speculation(settings.spec_draft_tokens, settings.spec_ngram_min, stats)
        self._batch_view = BatchView(watches.last_viewed_at, watches.batch)
        self._loads: list[Load] = []
        """Loads of the next plan."""
        self._waiting: deque[Waiting] = deque()
        self._rows: dict[RowId, Row] = {}
        self._leaving: list[Row] = []
        """Rows that the next plan drops."""
        self._left: dict[RowId, Row] = {}
        """Rows that were removed, until the plan that drops them is answered."""
        self._aborted: set[RowId] = set()
        """Rows in `_left` whose client left. Should the engine crash by one of them, it is tried all the same."""
        self._at_hand: Row | None = None
        """The row whose own token is handled: should that crash, it cannot go on from there."""
        self._proving = False
        self._due: dict[RowId, Row] = {}
        """Rows that may have something to store."""
        self._unanswered: deque[Plan] = deque()
        self._ids = count()
        self._steps = count()
        self._open = not self._recovery.closed
        self._prefill_budget = PrefillBudget.of(settings)
        self._memory_seen = watches.memory.latest
        self._releases_seen = watches.memory.latest.releases
        self._count = attrs.evolve(watches.stats.latest, stalled_since=None)
        self._added = Counter[str]()
        self._step_statistics = StepStatistics.of(watches.stats.latest)

    @property
    def accepts(self) -> bool:
        """Whether requests may still come."""
        return self._open

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def plans_in_flight(self) -> int:
        """Plans that are not answered."""
        return len(self._unanswered)

    @property
    def disk_busy(self) -> bool:
        """Whether something is on its way to the disk."""
        return self._disk.busy

    @property
    def must_prove_engine(self) -> bool:
        """Whether the engine crashed: then `proof` comes before any other plan."""
        return self._recovery.crashed

    # -- after a crash ---------------------------------------------------------------------------

    def take_up(self, now: float) -> None:
        """Requests that a scheduler before this one had. Those whose content was convicted are refused."""
        self._now = now
        for carried in self._recovery.take_up():
            admitted, row = carried.admitted, carried.row
            produced = row.num_output_tokens if row is not None else 0
            if self._blame.condemns(carried.standing, produced, self._now):
                self._refuse(admitted, carried.standing)
                continue
            if row is not None:
                self._recovery.note_resumed()
            tokens = token_bytes(admitted.prompt) if row is None else bytes(row.chain.tokens)
            chain = self._cache.chain(tokens, admitted.submission.request.cache_salt)
            self._waiting.append(Waiting(admitted, carried.standing, chain, carried.since, row))

    def proof(self, now: float) -> tuple[Plan, ...]:
        """Plans to send before anybody is tried: a token of a prompt that is nobody's. If the engine cannot do that, no request is
        to blame for what comes. `proved` takes each answer."""
        self._proving, self._now = True, now
        row, prompt = RowId(next(self._ids)), np.zeros(1, "<i4").tobytes()
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

    def _refuse(self, admitted: Admitted, standing: Standing) -> None:
        now, request = self._now, admitted.submission.request
        log.warning("request %s is refused: its content made the engine crash", request.request_id)
        admitted.submission.fail(crashes_engine(self._blame.quarantine.left_s(standing.content, now)))
        self._recovery.note_refused()
        self._add(requests_errored=1)

    def _pass(self, row: Row) -> None:
        """A suspect is beyond the place of the crash. While there are others, it makes room for the next trial."""
        self._blame.passed(row.standing, self._now)
        if not row.dropped and any(waiting.standing.suspect for waiting in self._waiting):
            self._preempt(row)

    def _preempt(self, row: Row) -> None:
        """The row leaves the engine and waits in the queue, before all others. It resumes with what it has: by its own
        blocks, where they are still there, else by computing."""
        self._take_out(row)
        self._waiting.appendleft(Waiting(row.admitted, row.standing, row.chain, row.since, row))

    def end(self, now: float) -> None:
        """The requests that are left go on with the next scheduler, if there may be one."""
        self._now = now
        if not self._carries:
            self.fail_all(self.last_words())
            return
        self._keep_aborted()
        involved, certain = self._involved(), False
        if (hand := self._at_hand) is not None:
            involved, certain = (
                (Involved(hand.standing, True, hand.num_output_tokens, hand.num_scheduled_tokens),),
                True,
            )
            self._rows.pop(hand.id, None)
            self._blame.quarantine.add(hand.standing.content, self._now)
            self._refuse(hand.admitted, hand.standing)
        carried = [Carried(row.admitted, row.standing, row, row.since) for row in self._rows.values()]
        carried += [Carried(one.admitted, one.standing, one.row, one.since) for one in self._waiting]
        left = LeftBehind(tuple(carried), involved, certain, not self._open, self.last_words())
        self._rows.clear()
        self._waiting.clear()
        self._add(requests_errored=self._recovery.hand_over(left))
        self.publish()

    def _keep_aborted(self) -> None:
        """Rows whose client left are tried if the crash may have been theirs; the others end."""
        unanswered = {row for plan in self._unanswered for row in plan.rows}
        for row in [self._left[name] for name in self._aborted]:
            if row.id in unanswered:
                self._rows[row.id] = self._left.pop(row.id)
            else:
                self._end_aborted(row)

    def _involved(self) -> tuple[Involved, ...]:
        """Rows of the plans that are not answered: the crash was in one of them, and it cannot be known in which."""
        if self._proving:
            return ()
        fresh = {row for plan in self._unanswered for row in plan.fresh_rows}
        named = {row for plan in self._unanswered for row in plan.rows}
        rows = self._left | self._rows
        return tuple(
            Involved(
                row.standing,
                name in fresh or row.num_output_tokens - row.num_resumed_tokens < 2,
                row.num_output_tokens,
                row.num_scheduled_tokens + row.num_draft_tokens,
            )
            for name, row in rows.items()
            if name in named
        )

    # -- requests --------------------------------------------------------------------------------

    def close(self) -> None:
        """No request comes any more."""
        self._open = False

    def hear(self, news: DiskNews, now: float) -> None:
        """News of the disk."""
        self._now = now
        self._loads += self._disk.hear(news)

    def enqueue(self, admitted: Admitted, now: float) -> None:
        """A request that the model can answer."""
        submission, self._now = admitted.submission, now
        self._add(total_requests=1)
        tokens = token_bytes(admitted.prompt)
        standing = self._blame.standing(admitted, tokens, now)
        if self._blame.refuses(standing, now):
            self._refuse(admitted, standing)
            return
        room = self._settings.rows - len(self._rows)
        if len(self._waiting) >= self._settings.max_queue_size + room:
            self._add(requests_errored=1)
            submission.fail(queue_full(self._settings.max_queue_size))
            return
        submission.accept(admitted.prompt, admitted.max_tokens)
        chain = self._cache.chain(tokens, submission.request.cache_salt)
        self._waiting.append(Waiting(admitted, standing, chain, now))

    def drop_aborted(self, now: float) -> None:
        """Drop requests whose client closed the reply channel, within one step: queued, prefilling or decoding (D4). A suspect is
        tried to its end, since a client that leaves early could otherwise crash the engine as often as it likes."""
        self._now = now
        aborted = [one for one in self._waiting if one.submission.aborted and not one.standing.suspect]
        for waiting in aborted:
            self._waiting.remove(waiting)
            waiting.submission.close()
            if waiting.ticket is not None:
                self._disk.forget(waiting.ticket)
        if aborted:
            self._add(requests_withdrawn=len(aborted))
        for row in [row for row in self._rows.values() if row.aborted and not row.standing.suspect]:
            self._take_out(row)
            self._aborted.add(row.id)

    def _dropped(self, row_id: RowId) -> None:
        """The engine has forgotten a row, and nothing of it is in flight."""
        row = self._left.pop(row_id, None)
        if row is not None and row.standing.suspect:
            self._blame.passed(row.standing, self._now)
        if row is not None and row_id in self._aborted:
            self._end_aborted(row)

    def _end_aborted(self, row: Row) -> None:
        self._aborted.remove(row.id)
        row.admitted.submission.close()
        self._add(requests_withdrawn=1)

    def _remove(self, row: Row) -> None:
        """End a row whose request is over."""
        self._take_out(row)
        row.admitted.submission.close()

    def _take_out(self, row: Row) -> None:
        """The one place that removes rows (F20). The drop travels with the next plan."""
        self._left[row.id] = self._rows.pop(row.id)
        self._drop(row)

    def _drop(self, row: Row) -> None:
        if not row.dropped:
            row.dropped = True
            self._leaving.append(row)

    def last_words(self) -> Problem:
        """For those who are left when the actor ends: 503 if the server is leaving, 500 if the engine crashed."""
        if lost := self._watches.ranks.latest.lost:
            return rank_lost(lost)
        said = "the engine stopped before the answer was complete"
        status, retry_s = (500, None) if self._open else (503, 1)
        return Problem(status, said, "server_error", None, "engine_stopped", retry_s)

    def fail_all(self, problem: Problem) -> None:
        """Send exactly one terminal event to every remaining request."""
        for aborted in [self._left[name] for name in self._aborted]:
            self._end_aborted(aborted)
        self._left |= self._rows
        left = [row.admitted.submission for row in self._rows.values()] + [w.submission for w in self._waiting]
        for submission in left:
            submission.fail(problem)
        self._add(requests_errored=len(left))
        for row in self._rows.values():
            self._drop(row)
        self._rows.clear()
        self._waiting.clear()
        self.publish()

    # -- plans -----------------------------------------------------------------------------------

    def schedule(self, now: float) -> Plan | None:
        """The next plan, to be sent at once; None while two are not answered, or while there is nothing to do. One empty plan
        flushes the last that had work."""
        self._now = now
        if len(self._unanswered) == PLANS_IN_FLIGHT:
            return None
        plan = self._compose()
        flushes = bool(self._unanswered) and self._unanswered[-1].has_work
        if not (plan.has_work or plan.changes or flushes):
            return None
        self._unanswered.append(plan)
        return plan

    def _compose(self) -> Plan:
        """Compose the plan of one step: every row that can decode does, and prefill gets what the stall bound leaves.

        The order matters. Memory pressure is relieved first, so that eviction precedes any use of the cache. Stores follow,
        before admission: room that they make is not promised to a row yet, and rows that leave are stored before they are
        dropped. Then rows are admitted, so that they prefill in this step. Drafts are decided before the plan counts the
        decoding rows' tokens. A row whose last token is scheduled here is dropped by the next plan, before that token is
        read. Evictions are collected last, since all earlier steps may evict.
        """
        self._relieve_pressure()
        loads, self._loads = tuple(self._loads), []
        stores = self._stores()
        drops, self._leaving = tuple(row.id for row in self._leaving), []
        admits = self._admit()
        decoding = [row for row in self._rows.values() if row.wants_token]
        chunks = self._chunks(busy=bool(decoding))
        drafts, watch = self._speculation.allow(decoding)
        for row, num_draft_tokens in zip(decoding, drafts, strict=False):
            row.num_draft_tokens += num_draft_tokens
        for row in decoding:
            row.num_scheduled_tokens += 1
        for chunk in chunks:
            self._plan_chunk(chunk)
        for row in self._rows.values():
            if row.num_scheduled_tokens >= row.admitted.max_tokens:
                self._drop(row)
        evicted = self._cache.freed()
        persist, persist_as = self._disk.pick()
        return Plan(
            next(self._steps), drops, admits, tuple(row.id for row in decoding), chunks, self._release_memory(),
            evict=evicted, store=stores, load=loads, persist=persist, persist_as=persist_as,
            settled=self._disk.settled(), drafts=drafts, watch=watch,
        )  # fmt: skip

    def _stores(self) -> tuple[Store, ...]:
        """What the plans so far have computed, of rows that go on and of those that leave. Before anybody is admitted:
        what makes room here is not promised to anyone yet."""
        due, self._due = self._due, {}
        stores: list[Store] = []
        for row in due.values():
            if not row.dropped:
                stores += self._cache.computed(row)
        for row in self._leaving:
            stores += self._cache.leave(row)
        return tuple(stores)

    def _admit(self) -> tuple[Admit, ...]:
        prefilling = sum(row.num_unscheduled_tokens > 0 for row in self._rows.values())
        pressure = self._watches.memory.latest.under_pressure
        held = sum(not row.dropped for row in self._rows.values())
        free = free_rows(held, prefilling, self._settings.rows, self._settings.prefill_batch_size, pressure)
        admits: list[Admit] = []
        for waiting in self._candidates() if free else ():
            if len(admits) == free:
                break
            found = self._look(waiting)
            if found is not None:
                self._waiting.remove(waiting)
                admits.append(self._enter(waiting, found))
        return tuple(admits)

    def _candidates(self) -> Sequence[Waiting]:
        """Requests of the queue that may enter, as far as isolated rows let them."""
        if not self._waiting:
            return ()
        now = self._now
        return may_enter(
            tuple(self._waiting),
            [row.standing for row in (*self._rows.values(), *self._left.values())],
            self._blame.trial_order(waiting.standing for waiting in self._waiting),
            idle=not self._unanswered,
            apart=self._blame.apart(now),
            now=now,
        )

    def _look(self, waiting: Waiting) -> Found | None:
        """Look a waiting request up in the cache. None while it waits; later requests may overtake it.

        Admission has a fixed order. A request that is scored or embedded needs its whole prompt, so it bypasses the cache. A
        request that already waits for a primary or the disk keeps waiting. Then the tree is matched; if more tokens are only
        on disk than a primary computes, the disk is asked, once. Only then the request may wait for a primary, if that
        saves more than it costs. In all other cases it is admitted with what was found.
        """
        request = waiting.submission.request
        begun = waiting.row is not None and waiting.row.num_output_tokens > 0
        if (request.prompt_logprobs is not None and not begun) or request.embed:
            return self._cache.nothing(waiting.chain)
        if waiting.waits:
            return None
        found = self._cache.look(waiting.chain)
        if waiting.ticket is None and found.missing_tokens > found.gain and not waiting.standing.suspect:
            # While a suspect waits nobody else runs, so it does not wait for a disk, which may hang.
            waiting.ticket = self._disk.load(found, self._prefill_budget.prefill_rate)
            if waiting.ticket is not None:
                return None
        if found.primary is None or found.gain < self._worth_waiting():
            return found
        if waiting.primary is None:
            self._cache.waits()
        waiting.primary, waiting.until = found.primary, found.until
        self._cache.wait_for(found)
        return None

    def _worth_waiting(self) -> int:
        """Tokens whose prefill takes as long as the step that waiting may cost."""
        return max(self._settings.block_size, int(self._prefill_budget.decode_s * self._prefill_budget.prefill_rate))

    def _enter(self, waiting: Waiting, found: Found) -> Admit:
        admitted, row_id = waiting.admitted, RowId(next(self._ids))
        if waiting.row is None:
            row = Row.of(row_id, admitted, waiting.standing, self._tokenizer, waiting.chain)
            row.record = self._record(admitted)
        else:
            row = waiting.row.again(row_id, waiting.chain)
        self._rows[row.id] = row
        # What is embedded once is hardly ever continued: its blocks would only take others' place.
        restore = None if admitted.submission.request.embed else self._cache.enter(row, found)
        row.num_unscheduled_tokens -= found.tokens
        if waiting.row is None:
            read = 0 if waiting.ticket is None else waiting.ticket.read_tokens
            row.start(found.tokens, min(read, found.tokens), self._now)
            self._add(total_cached_tokens=found.tokens, total_prompt_tokens=row.num_prompt_tokens)
        return self._admission(row, restore)

    def _admission(self, row: Row, restore: Restore | None) -> Admit:
        request = row.admitted.submission.request
        prompt = np.frombuffer(bytes(row.chain.tokens), ">i4").astype("<i4").tobytes()
        return Admit(
            row.id, prompt, request.sampling, request.logprobs, restore,
            request.grammar, request.min_tokens, tuple(sorted(row.ends)) if request.min_tokens else (),
            None if row.num_resumed_tokens else request.prompt_logprobs, row.admitted.thinking,
            self._pooling if request.embed else None, row.record is not None, row.num_resumed_tokens,
        )  # fmt: skip

    def _record(self, admitted: Admitted) -> Record | None:
        """None for a row that never drafts."""
        request = admitted.submission.request
        wanted = (request.speculation or self._drafts) == "ngram"
        return self._speculation.record() if wanted and not (request.embed or self._speculation.stats.reason) else None

    def _relieve_pressure(self) -> None:
        """What is cached makes room for what is needed, once for each look of the janitor."""
        memory = self._watches.memory.latest
        if memory.under_pressure and memory is not self._memory_seen:
            self._cache.evict(int(memory.active_bytes - memory.limit_bytes * self._settings.memory_fraction))
        self._memory_seen = memory

    def _chunks(self, *, busy: bool) -> tuple[Chunk, ...]:
        prefilling = [row for row in self._rows.values() if row.num_unscheduled_tokens > 0]
        if not prefilling:
            return ()
        work = self._prefill_budget.turn({row.work for row in prefilling})
        remaining = [(row.id, row.next_chunk) for row in prefilling if row.work == work]
        self._prefill_budget.plan(work)
        budget = self._prefill_budget.budget(sum(tokens for _, tokens in remaining), busy=busy, work=work)
        return share_chunks(remaining, budget, self._settings.prefill_step_size)

    def _plan_chunk(self, chunk: Chunk) -> None:
        row = self._rows[chunk.row]
        row.num_unscheduled_tokens -= chunk.tokens
        if row.num_unscheduled_tokens == 0:
            row.num_scheduled_tokens = row.num_resumed_tokens + 1
        self._due[row.id] = row

    def _release_memory(self) -> bool:
        """True once for each time that the janitor asked."""
        asked = self._watches.memory.latest.releases
        release, self._releases_seen = asked != self._releases_seen, asked
        return release

    # -- results ---------------------------------------------------------------------------------

    def stalled(self, since: float) -> None:
        """The oldest plan has had no answer for too long; readiness is progress (D11, F27)."""
        self._count = attrs.evolve(self._count, stalled_since=since, stalls=self._count.stalls + 1)

    def update(self, stepped: Stepped, now: float) -> None:
        """The answer to the oldest plan that has none: rows get their tokens and clients theirs."""
        self._now = now
        plan = self._unanswered.popleft()
        assert plan.step == stepped.step, f"plan {plan.step} was answered by step {stepped.step}"
        if self._count.stalled_since is not None:
            self._count = attrs.evolve(self._count, stalled_since=None)
        for dropped in plan.drop:
            self._dropped(dropped)
        self._prefill_budget.answered(plan, stepped)
        self._disk.persisted(stepped.persisted)
        self._learn(plan, stepped)
        for row_id, at in stepped.prompt_logprobs:
            if row_id in self._rows:
                self._rows[row_id].scores.append(at)
        for row_id, vector in stepped.embedded:
            if row_id in self._rows:
                self._finish_embedding(self._rows[row_id], vector)
        for row_id, reason in stepped.failed:
            if row_id in self._rows:
                self._give_up(
                    self._rows[row_id], grammar_failed(self._rows[row_id].admitted.submission.request, reason)
                )
        decoding = sum(map(self._rows.__contains__, plan.decode))
        committed = self._commit(stepped, now)
        self._batch_view.stepped(now, decoded=bool(plan.decode), produced=bool(stepped.rows))
        prefilled = sum(chunk.tokens for chunk in plan.prefill)
        self._step_statistics.stepped(now, decoding=decoding, produced=bool(stepped.rows), tokens=committed + prefilled)
        self._add(steps=int(plan.has_work), tokens_generated=committed, total_prefill_tokens=prefilled)

    def _commit(self, stepped: Stepped, now: float) -> int:
        """Give each row its tokens, one by one; how many there were."""
        logprobs: dict[RowId, list[TokenLogprobs]] = {}
        for row_id, at in stepped.logprobs:
            logprobs.setdefault(row_id, []).append(at)
        committed, before = 0, None
        for row_id, token in zip(stepped.rows, stepped.tokens, strict=True):
            row = self._rows.get(row_id)
            if row is None:  # It ended while this step was in flight, or with an earlier token of it.
                continue
            committed += 1
            if row is before:
                self._count_draft(row)
            before = row
            self._at_hand = row
            finished = row.append_token(token, logprobs[row_id].pop(0) if row_id in logprobs else None, now)
            if finished is not None:
                row.admitted.submission.reply(finished)
            self._at_hand = None
            if finished is not None:
                self._remove(row)
                self._add(requests_completed=1)
                continue
            if self._cache.wants_storing(row):
                self._due[row_id] = row
            if row.standing.suspect and row.num_output_tokens >= row.standing.passes_at:
                self._pass(row)
        return committed

    def _count_draft(self, row: Row) -> None:
        """One was right: a token that no plan counted on. So the last one may be on its way already."""
        row.num_scheduled_tokens += 1
        if row.num_scheduled_tokens >= row.admitted.max_tokens:
            self._drop(row)

    def _learn(self, plan: Plan, stepped: Stepped) -> None:
        """Learn from the results of drafts."""
        for row_id, num_draft_tokens in zip(plan.decode, plan.drafts, strict=False):
            if row_id in self._rows:
                self._rows[row_id].num_draft_tokens -= num_draft_tokens
        self._speculation.answered(plan, stepped, self._rows)

    def _finish_embedding(self, row: Row, vector: bytes) -> None:
        submission = row.admitted.submission
        submission.reply(Embedded(vector))
        submission.reply(Finished("stop", 0, at=self._now))
        self._remove(row)
        self._add(requests_completed=1)

    def _give_up(self, row: Row, problem: Problem) -> None:
        row.admitted.submission.fail(problem)
        self._remove(row)
        self._add(requests_errored=1)

    # -- facts -----------------------------------------------------------------------------------

    def _add(self, **more: int) -> None:
        """Count events. They are published together, once a step."""
        self._added.update(more)

    def publish(self) -> None:
        """What the core counts, for whoever looks."""
        added = {name: getattr(self._count, name) + n for name, n in self._added.items()}
        self._added.clear()
        self._count = attrs.evolve(
            self._count,
            **added,
            cache=self._cache.stats(),
            active_sequences=len(self._rows),
            queued_requests=len(self._waiting),
            inter_token_latency=self._step_statistics.inter_token_latency,
            step_tokens=self._step_statistics.step_tokens,
            speculation=self._speculation.stats,
            recovery=self._recovery.look(self._now),
            prefilling_sequences=sum(row.num_unscheduled_tokens > 0 for row in self._rows.values()),
        )
        self._watches.stats.publish(self._count)
        self._batch_view.show(self._rows.values(), self._now)


def grammar_failed(request: Generate, reason: str) -> Problem:
    """A row's grammar, or its thinking, cannot be followed beyond a place of its answer."""
    param = None if request.grammar is None else request.grammar.param
    said = f"{param} cannot be followed any further: {reason.strip()}; make it simpler" if param else reason
    return Problem(400, said, "invalid_request_error", param, "grammar_failed")
