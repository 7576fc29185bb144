"""A snapshot of the batch for viewers; two comparisons a step without any."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from math import inf

import attrs

from trouper.actors.scheduling.sequence import QUEUED, Sequence, State
from trouper.protocol.batch import NOTHING_SHOWN, BatchStats, RowState, RowStats
from trouper.protocol.watch import Watch

VIEW_S = 2.0
"""Time for which one view keeps the snapshot current; viewers renew earlier."""
LATENCIES_KEPT = 512


@attrs.define(eq=False)
class BatchView:
    """Answers each view once, after the current step."""

    _last_viewed_at: Watch[float]
    _batch: Watch[BatchStats]
    # Time of the last answered view.
    _answered: float = -inf
    _latencies: deque[float] = attrs.field(factory=lambda: deque(maxlen=LATENCIES_KEPT))
    _latency_count: int = 0
    # Time of the last observed step with tokens.
    _tokens_at: float | None = None

    @property
    def _watched(self) -> bool:
        return (
            self._batch.latest is not NOTHING_SHOWN or self._last_viewed_at.latest > self._answered
        )

    def stepped(self, now: float, *, decoded: bool, produced: bool) -> None:
        """Observe a step with committed tokens. `decoded`: rows decoded."""
        if not self._watched:
            self._tokens_at = None
            return
        if decoded and self._tokens_at is not None:
            self._latencies.append(now - self._tokens_at)
            self._latency_count += 1
        if produced:
            self._tokens_at = now

    def show(self, rows: Collection[Sequence], queue: Iterable[Sequence], now: float) -> None:
        """Publish the view if due. Called after each step, and before idling."""
        if not self._watched:
            return
        look, viewed = self._last_viewed_at.latest, self._last_viewed_at.latest > self._answered
        self._answered = look
        if now - look > VIEW_S:
            self._batch.publish(NOTHING_SHOWN)
        elif viewed or (self._batch.latest.rows and not rows):
            # An idle scheduler would leave ended rows in the view.
            stats = self._stats(rows, queue, now)
            # A new time alone is no news: an idle scheduler also comes here every few seconds.
            if attrs.evolve(stats, at=self._batch.latest.at) != self._batch.latest:
                self._batch.publish(stats)

    def _stats(
        self, rows: Collection[Sequence], queue: Iterable[Sequence], now: float
    ) -> BatchStats:
        shown = tuple(
            map(_stats_of, (*rows, *(sequence for sequence in queue if sequence.started)))
        )
        return BatchStats(
            at=now,
            rows=shown,
            inter_token_latencies_s=tuple(self._latencies),
            inter_token_latency_count=self._latency_count,
        )


def _stats_of(sequence: Sequence) -> RowStats:
    state = _state_of(sequence)
    restored, to_restore = _restored(sequence) if state in ("preempted", "restoring") else (0, 0)
    return RowStats(
        row=sequence.id,
        request_id=sequence.request.request_id,
        prompt_tokens=sequence.num_prompt_tokens,
        cached_tokens=sequence.num_cached_tokens,
        prefilled_tokens=min(
            sequence.num_prompt_tokens,
            sequence.num_prefill_tokens - sequence.num_unscheduled_tokens,
        ),
        generated_tokens=sequence.num_output_tokens,
        max_tokens=sequence.max_tokens,
        since=sequence.since,
        first_token_at=sequence.output.first_token_at,
        state=state,
        priority=sequence.request.priority,
        restored_tokens=restored,
        tokens_to_restore=to_restore,
    )


def _state_of(sequence: Sequence) -> RowState:
    if sequence.state in QUEUED | {State.PREEMPTED}:
        return "preempted"
    if sequence.has_decoded:
        return "decoding"
    return "restoring" if sequence.num_resumed_tokens else "prefilling"


def _restored(sequence: Sequence) -> tuple[int, int]:
    if sequence.state not in QUEUED | {State.PREEMPTED}:
        needed = sequence.num_prefill_tokens
        return min(sequence.num_computed_tokens, needed), needed
    read = sequence.read if sequence.state is State.WAITING_FOR_DISK else None
    return (0 if read is None else read.read_tokens), sequence.num_tokens
