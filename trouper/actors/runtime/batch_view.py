"""What the scheduler shows of its batch, and when. It costs two comparisons a step while nobody looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import inf

import attrs
import trio

from trouper.actors.scheduling.sequence import Row
from trouper.protocol.batch import NOTHING_SHOWN, BatchStats, RowStats
from trouper.protocol.watch import Watch

LOOK_S = 2.0
"""A look holds for so long; whoever goes on looking looks again before."""
GAPS_KEPT = 512
"""Steps between two looks, at most: of more the last are shown."""


@attrs.define(eq=False)
class BatchView:
    """Each look is answered once, after the step at hand: rows are copied as often as somebody looks, however fast the
    steps are."""

    _looked: Watch[float]
    _batch: Watch[BatchStats]
    _answered: float = -inf
    """The look that was answered last."""
    _gaps: deque[float] = attrs.field(factory=lambda: deque(maxlen=GAPS_KEPT))
    _gap_count: int = 0
    _tokens_at: float | None = None
    """When a step that was looked at last gave tokens."""

    @property
    def _watched(self) -> bool:
        """False for nearly all of a server's life."""
        return self._batch.latest is not NOTHING_SHOWN or self._looked.latest > self._answered

    def stepped(self, *, decoded: bool, produced: bool) -> None:
        """A step's tokens were committed. `decoded`: there were streams that had waited for them."""
        if not self._watched:
            self._tokens_at = None
            return
        now = trio.current_time()
        if decoded and self._tokens_at is not None:
            self._gaps.append(now - self._tokens_at)
            self._gap_count += 1
        if produced:
            self._tokens_at = now

    def show(self, rows: Collection[Row]) -> None:
        """After each step, and before resting."""
        if not self._watched:
            return
        look, asked = self._looked.latest, self._looked.latest > self._answered
        self._answered = look
        if trio.current_time() - look > LOOK_S:
            self._batch.publish(NOTHING_SHOWN)
        elif asked or (self._batch.latest.rows and not rows):  # Resting, it would show rows that are no more.
            self._batch.publish(self._facts(rows))

    def _facts(self, rows: Collection[Row]) -> BatchStats:
        shown = tuple(map(_facts_of, rows))
        return BatchStats(at=trio.current_time(), rows=shown, gaps_s=tuple(self._gaps), gap_count=self._gap_count)


def _facts_of(row: Row) -> RowStats:
    return RowStats(
        row=row.id,
        request_id=row.admitted.submission.request.request_id,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        prefilled_tokens=min(row.prompt_tokens, row.prefill_tokens - row.unplanned),
        generated_tokens=row.produced,
        max_tokens=row.admitted.max_tokens,
        since=row.since,
        first_token_at=row.first_token_at,
    )
