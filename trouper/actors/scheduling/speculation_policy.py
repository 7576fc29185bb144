"""Speculation policy: measured acceptance against the measured cost of a step that verifies drafts (`draft_costs`). Pure.

A row drafts nothing until its output repeats earlier tokens. While no row does, the engine is only asked periodically which
rows repeat something, which does not lengthen a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import attrs
import numpy as np

from trouper.actors.scheduling.draft_costs import Costs, size_of
from trouper.protocol.health import SpeculationStats
from trouper.protocol.plans import Plan, RowId, Stepped

WATCH_EVERY = 8
"""Maximum number of plans between two `Plan.watch` (or the number of rows, if that is smaller). A watch costs a row some
microseconds, and an answer that begins to copy is found within this many tokens."""
IDLE_LIMIT = 16
"""Idle limit: number of steps without a draft after which a row counts as not repeating."""
MIN_SPEED_UP = 1.05
"""Minimum expected speed-up over plain steps for which drafts are allowed."""
PRIOR = (3.0, 1.0)
"""Prior counts of (accepted, rejected) drafted tokens of a row that begins to draft."""
DECAY = 0.85
"""Decay of the counts with each step."""
MIN_ACCEPTANCE = 0.4
"""Acceptance rate below which the match that a row needs before it drafts again is doubled."""
MAX_REQUIRED_MATCH = 64
"""Upper bound of the match that a row needs before it drafts."""


@attrs.define(eq=False)
class Record:
    """History of one row's drafts."""

    required_match: int
    """Number of the row's last tokens that must have occurred before, for the row to draft."""
    min_match: int = attrs.field(default=attrs.Factory(lambda record: record.required_match, takes_self=True))
    right: float = 0.0
    wrong: float = 0.0
    allowed_steps: float = 1.0
    found: float = 1.0
    quiet: int = IDLE_LIMIT
    """Steps since the row last drafted or repeated something."""

    @property
    def active(self) -> bool:
        return self.quiet < IDLE_LIMIT

    @property
    def chance(self) -> float:
        """Probability that the next drafted token is accepted."""
        return (self.right + PRIOR[0]) / (self.right + self.wrong + sum(PRIOR))

    @property
    def finds(self) -> float:
        """Share of steps in which the row had something to draft when it was allowed to."""
        return self.found / self.allowed_steps

    def repeats(self, matched: int) -> None:
        if matched >= self.required_match:
            self.quiet = 0

    def drafted(self, tokens: int, right: int) -> None:
        """Learn from a step in which the row was allowed to draft; 0 tokens: the row had nothing to draft."""
        self.allowed_steps = DECAY * self.allowed_steps + 1
        self.found = DECAY * self.found + (tokens > 0)
        self.quiet += 1
        if not tokens:
            return
        self.quiet = 0
        self.right = DECAY * self.right + right
        self.wrong = DECAY * self.wrong + (right < tokens)
        if self.chance < MIN_ACCEPTANCE:
            self.required_match = min(2 * self.required_match, MAX_REQUIRED_MATCH)
            self.right = self.wrong = 0.0
            self.quiet = IDLE_LIMIT
        elif self.wrong < 0.1 * self.right:
            self.required_match = self.min_match


class Drafter(Protocol):
    """The part of a row that this policy reads."""

    @property
    def record(self) -> Record | None:
        """History of the row's drafts; None: the row never drafts."""

    @property
    def room(self) -> int:
        """Number of tokens, beyond the one of the next plan, for which the answer has room."""


class Speculation:
    """Decides for each plan how much each row drafts, and learns from each result."""

    def __init__(self, max_tokens: int, min_match: int, stats: SpeculationStats) -> None:
        """Maximum draft of `most` tokens; minimum match of `least` tokens. Counters continue from `stats`."""
        self._sizes = sorted({min(1 << power, max_tokens) for power in range(max_tokens.bit_length() + 1)})
        self._min_match = min_match
        self._costs = Costs()
        self._unwatched = WATCH_EVERY
        self._promised = 1.0
        """Expected speed-up of the last drafts over plain steps."""
        self._repeating = False
        """Whether any row may repeat something. If not, no row need be examined."""
        self.stats = stats

    def record(self) -> Record:
        """New history, for a row that may draft."""
        return Record(self._min_match)

    def allow(self, rows: Sequence[Drafter]) -> tuple[tuple[int, ...], bool]:
        """Maximum drafts of the decoding rows, () if no row may draft; and whether the plan watches for rows that repeat something."""
        if not any(row.record is not None for row in rows):
            return (), False
        drafts = self._best(rows)
        self._unwatched += 1
        watch = bool(drafts) or self._unwatched >= min(WATCH_EVERY, len(rows))
        if watch:
            self._unwatched = 0
        return drafts, watch

    def _best(self, rows: Sequence[Drafter]) -> tuple[int, ...]:
        """The drafts with the highest expected tokens a second: one size, for the most promising rows."""
        if not self._repeating:
            return ()
        active = [
            (index, row.record, row.room)
            for index, row in enumerate(rows)
            if row.record is not None and row.record.active and row.room > 0
        ]
        if not active:
            self._repeating = False
            return ()
        if not self._costs.comparable(len(rows), self._promised):
            return ()
        promised, chosen, size = self._promise([(record, room) for _, record, room in active], len(rows))
        self._promised = promised
        if promised <= MIN_SPEED_UP:
            return ()
        allowed = {active[one][0]: min(size, active[one][2]) for one in chosen}
        return tuple(allowed.get(index, 0) for index in range(len(rows)))

    def _promise(self, active: Sequence[tuple[Record, int]], rows: int) -> tuple[float, list[int], int]:
        """The best (speed-up over plain steps, indices of active rows, size) over all sizes and, for each size, over all numbers of
        its most promising rows. A step takes longer only if some row has something to draft."""
        chance, finds, room = np.array([(record.chance, record.finds, room) for record, room in active]).T
        sizes = self._costs.affordable(rows, self._sizes)
        # Expected number of accepted tokens of a draft: those before the first rejected one.
        expected = chance * (1 - chance ** np.minimum(np.array(sizes)[:, None], room)) / (1 - chance)
        order = np.argsort(-expected, axis=1, kind="stable")
        tokens = rows + np.cumsum(np.take_along_axis(finds * expected, order, axis=1), axis=1)
        nobody = np.cumprod((1 - finds)[order], axis=1)
        full = np.array([[self._costs.ratio(rows, size_of(size))] for size in sizes])
        gain = tokens / rows / (nobody * self._costs.ratio(rows, 0) + (1 - nobody) * full)
        best, last = np.unravel_index(np.argmax(gain), gain.shape)
        return float(gain[best, last]), order[best, : last + 1].tolist(), sizes[best]

    def answered(self, plan: Plan, stepped: Stepped, rows: Mapping[RowId, Drafter]) -> None:
        """Learn from the result of a plan. `rows`: the rows that still exist."""
        answers = {row: (tokens, right) for row, tokens, right in stepped.drafted}
        for row, max_tokens in zip(plan.decode, plan.drafts, strict=False):
            if max_tokens and row in rows and (record := rows[row].record) is not None:
                record.drafted(*answers.get(row, (0, 0)))
        self._repeating = self._repeating or bool(stepped.matched)
        for row, matched in stepped.matched:
            if row in rows and (record := rows[row].record) is not None:
                record.repeats(matched)
        if plan.decode and not plan.prefill and not plan.admit and stepped.seconds > 0:
            longest = max((tokens for tokens, _ in answers.values()), default=0)
            self._costs.measured(len(plan.decode), size_of(longest) if plan.drafts else None, stepped.seconds)
        parks = not plan.drafts and any(row.record is not None for row in rows.values())
        self._count(plan, stepped, parked=parks)

    def _count(self, plan: Plan, stepped: Stepped, *, parked: bool) -> None:
        stats = self.stats
        if parked and plan.decode:
            stats = attrs.evolve(stats, parked_s=stats.parked_s + stepped.seconds)
        if stepped.drafted:
            stats = attrs.evolve(
                stats,
                steps=stats.steps + 1,
                drafts=stats.drafts + len(stepped.drafted),
                drafted=stats.drafted + sum(tokens for _, tokens, _ in stepped.drafted),
                accepted=stats.accepted + sum(right for _, _, right in stepped.drafted),
                accepted_at=by_position(stats.accepted_at, (right for _, _, right in stepped.drafted)),
            )
        self.stats = stats


def by_position(before: tuple[int, ...], accepted: Iterable[int]) -> tuple[int, ...]:
    """Counts of accepted tokens by their index in a draft, with those of `accepted` added."""
    counts = list(before)
    for right in accepted:
        counts += [0] * (right - len(counts))
        counts[:right] = [count + 1 for count in counts[:right]]
    return tuple(counts)
