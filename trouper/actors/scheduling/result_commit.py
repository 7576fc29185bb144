"""Commits a step's tokens to sequences, one by one, up to the end of each answer."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import attrs

from trouper.actors.scheduling.crash_handover import CrashHandover
from trouper.actors.scheduling.image_items import UnusableImage
from trouper.actors.scheduling.prefix_cache import PrefixCache
from trouper.actors.scheduling.running_batch import RunningBatch
from trouper.actors.scheduling.sequence import Sequence, State
from trouper.actors.scheduling.step_statistics import SchedulerCounters
from trouper.actors.scheduling.waiting_queue import WaitingQueue
from trouper.protocol.plans import NOT_A_NUMBER, Plan, RowFault, RowId, Stepped
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Embedded, Finished, Progress, TokenLogprobs
from trouper.protocol.requests import Generate

# A penalty above this may make a logit minus infinity.
EXTREME = 1e30


@attrs.define(kw_only=True, eq=False)
class ResultCommit:
    queue: WaitingQueue
    batch: RunningBatch
    cache: PrefixCache
    handover: CrashHandover
    counters: SchedulerCounters
    to_store: dict[RowId, Sequence] = attrs.field(factory=dict)
    """Rows that may have blocks to store in the next plan."""
    handled: Sequence | None = None
    """Sequence whose token is being committed; cannot go on after a crash."""

    def store_later(self, sequence: Sequence) -> None:
        """Let the next plan store the blocks that the sequence has filled."""
        self.to_store[sequence.id] = sequence

    def take_to_store(self) -> list[Sequence]:
        to_store, self.to_store = self.to_store, {}
        return [sequence for sequence in to_store.values() if not sequence.dropped]

    def drops(self, plan: Plan, now: float) -> None:
        """Handle drops that the engine has carried out. Ended suspects are acquitted."""
        for row in plan.drop:
            sequence = self.batch.dropped(row)
            if sequence is not None and sequence.standing.suspect:
                self.handover.recovery.blame.passed(sequence.standing, now)

    def chunks(self, plan: Plan, now: float) -> None:
        """Report progress of prefilling rows, also to sequences that wait for one."""
        # Preempted sequences have no time limit, and must not get one by this.
        rows = {chunk.row for chunk in plan.prefill} & self.batch.rows.keys()
        if plan.encode:
            rows |= {row for row, waiting in self.batch.rows.items() if waiting.images_left}
        for row in rows:
            prefilling = self.batch.rows[row]
            total = prefilling.num_prefill_tokens
            done = min(prefilling.num_computed_tokens, total)
            progress = Progress(now, prefilled_tokens=done, tokens_to_prefill=total)
            prefilling.client.report(progress)
        for sequence in self.queue if rows else ():
            waits = sequence.primary is not None and sequence.primary.id in rows
            if waits and sequence.state is not State.PREEMPTED:
                sequence.client.report(Progress(now))

    def results(self, stepped: Stepped, now: float) -> None:
        """Take what is not a token: a prompt's log-probabilities, an embedding, a row's failure."""
        rows = self.batch.rows
        for row, logprobs in stepped.prompt_logprobs:
            if row in rows:
                rows[row].output.scores.append(logprobs)
        for row, vector in stepped.embedded:
            if row in rows:
                self._finish_embedding(rows[row], vector, now)
        for row, fault in stepped.failed:
            if row in rows:
                if fault == NOT_A_NUMBER:
                    self.cache.release(rows[row])
                self._fail(rows[row], row_failed(rows[row].request, fault))

    def unusable(self, images: Iterable[UnusableImage]) -> None:
        """Fail the requests that need an image without pixels or vectors."""
        for image in images:
            for sequence in [*self.batch.rows.values()]:
                if sequence.needs_image((image.id,)):
                    self._fail(sequence, image_failed(sequence, image))

    def tokens(self, stepped: Stepped, now: float) -> int:
        """Commit tokens; returns the number. A row gets none after the end. Tokens after a row's
        first were drafted."""
        logprobs: dict[RowId, list[TokenLogprobs]] = {}
        for row, at in stepped.logprobs:
            logprobs.setdefault(row, []).append(at)
        committed, before, rows = 0, None, self.batch.rows
        for row, token in zip(stepped.rows, stepped.tokens, strict=True):
            if (sequence := rows.get(row)) is None:
                continue
            committed += 1
            if sequence is before:
                self._count_draft(sequence)
            before = sequence
            self._append(
                sequence, token, logprobs[row].pop(0) if logprobs and row in logprobs else None, now
            )
        return committed

    def _count_draft(self, sequence: Sequence) -> None:
        # No plan counted an accepted draft, so the last token may be in flight already.
        if sequence.schedule_token():
            self.batch.drop(sequence)

    def _append(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float
    ) -> None:
        self.handled = sequence
        finished = sequence.append_token(token, logprobs, now)
        if finished is not None:
            sequence.client.reply(finished)
            self.handled = None
            self._finish(sequence)
            return
        self.handled = None
        if sequence.output.num_tokens >= sequence.stores_from and self.cache.wants_storing(
            sequence
        ):
            self.store_later(sequence)
        if sequence.standing.suspect and sequence.num_output_tokens >= sequence.standing.passes_at:
            self.handover.passed(sequence, now)

    def _finish(self, sequence: Sequence) -> None:
        self.batch.remove(sequence)
        sequence.finish()
        self.counters.add(requests_completed=1)

    def _finish_embedding(self, sequence: Sequence, vector: bytes, now: float) -> None:
        sequence.client.reply(Embedded(vector))
        sequence.client.reply(Finished("stop", 0, at=now))
        self._finish(sequence)

    def _fail(self, sequence: Sequence, problem: Problem) -> None:
        sequence.fail(problem)
        self.batch.remove(sequence)
        self.counters.add(requests_errored=1)


def image_failed(sequence: Sequence, image: UnusableImage) -> Problem:
    """The error of one request, with the image's place in the body."""
    origins = (
        one.source.origin for one in sequence.client.images if one.span.digest == image.digest
    )
    origin = next(origins, None)
    return Problem(image.status, f"{origin}: {image.reason}", param=origin, code=image.code)


def row_failed(request: Generate, fault: RowFault) -> Problem:
    match fault.kind:
        case "not_a_number":
            return Problem(500, fault.reason, "server_error", None, "not_a_number")
        case "logits_processor":
            return Problem(
                500, fault.reason, "server_error", "logits_processors", "logits_processor_failed"
            )
        case "no_choice":
            return _no_choice(request)
        case "grammar":
            assert request.grammar is not None, "a row without a grammar follows none"
            param = request.grammar.param
            message = (
                f"{param} cannot be followed any further: {fault.reason.strip()}; make it simpler"
            )
            return Problem(400, message, "invalid_request_error", param, "grammar_failed")


def _no_choice(request: Generate) -> Problem:
    """Names the parameters that may forbid all tokens, mostly together."""
    # DRY's penalty is bounded, so that it forbids none.
    sampling = request.sampling
    forbidding = {
        "logit_bias": any(bias == -inf for _, bias in sampling.logit_bias),
        "repetition_penalty": sampling.repetition_penalty > EXTREME,
        "presence_penalty": sampling.presence_penalty > EXTREME,
        "frequency_penalty": sampling.frequency_penalty > EXTREME,
        "logits_processors": bool(request.logits_processors),
        "min_tokens": request.min_tokens > 0,
        "thinking_token_budget": request.thinking_token_budget is not None,
    }
    params = [name for name, forbids in forbidding.items() if forbids]
    params += [] if request.grammar is None else [request.grammar.param]
    if not params:
        return Problem(
            500,
            "the model leaves no token to choose: all its logits are minus infinity",
            "server_error",
            None,
            "no_choice",
        )
    *others, last = params
    names = f"{', '.join(others)} and {last}" if others else last
    message = f"no token was left to choose at some point of the answer, by {names}"
    return Problem(400, message, "invalid_request_error", params[0], "no_choice")
