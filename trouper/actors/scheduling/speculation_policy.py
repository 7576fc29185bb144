"""When drafts pay: measured acceptance against the measured cost of a step that verifies them (`draft_costs`). Pure.

A row drafts nothing until it repeats something: while all are quiet the engine is only asked now and then who does, which
costs no step anything.
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
"""Plans, at most, and at most as many as there are rows. Then it is asked who repeats something, which costs a row some
microseconds: an answer that begins to copy is found within so many tokens."""
GRACE = 16
"""Answers without a draft, after which a row has stopped repeating."""
MARGIN = 1.05
"""Drafts must promise so much more than a plain step."""
HOPE = (3.0, 1.0)
"""Of a row that begins to draft: so many right ones, so many wrong ones."""
MEMORY = 0.85
"""What an older answer counts, against the next one."""
HOPELESS = 0.4
"""Of a row's drafts fewer are right: it must repeat twice as much before it drafts again."""
MOST_NEEDED = 64


@attrs.define(eq=False)
class Record:
    """What is known of one row's drafts."""

    needs: int
    """It drafts once so many of its last tokens stand somewhere before."""
    least: int = attrs.field(default=attrs.Factory(lambda record: record.needs, takes_self=True))
    right: float = 0.0
    wrong: float = 0.0
    asked: float = 1.0
    found: float = 1.0
    quiet: int = GRACE
    """Answers since it last drafted or repeated something."""

    @property
    def active(self) -> bool:
        return self.quiet < GRACE

    @property
    def chance(self) -> float:
        """That the next drafted token is right."""
        return (self.right + HOPE[0]) / (self.right + self.wrong + sum(HOPE))

    @property
    def finds(self) -> float:
        """How often it has something to draft when it is asked."""
        return self.found / self.asked

    def repeats(self, matched: int) -> None:
        if matched >= self.needs:
            self.quiet = 0

    def drafted(self, tokens: int, right: int) -> None:
        """It was asked; 0 tokens: it had nothing."""
        self.asked = MEMORY * self.asked + 1
        self.found = MEMORY * self.found + (tokens > 0)
        self.quiet += 1
        if not tokens:
            return
        self.quiet = 0
        self.right = MEMORY * self.right + right
        self.wrong = MEMORY * self.wrong + (right < tokens)
        if self.chance < HOPELESS:
            self.needs = min(2 * self.needs, MOST_NEEDED)
            self.right = self.wrong = 0.0
            self.quiet = GRACE
        elif self.wrong < 0.1 * self.right:
            self.needs = self.least


class Drafter(Protocol):
    """A row, as far as this concerns."""

    @property
    def record(self) -> Record | None:
        """None: it never drafts."""

    @property
    def room(self) -> int:
        """For so many tokens beyond the next plan's one there is room in its answer."""


class Speculation:
    """Decides for each plan who drafts how much; learns from each answer."""

    def __init__(self, most: int, least: int, facts: SpeculationStats) -> None:
        """At most `most` tokens a draft; a match of `least` tokens is worth a try. Counters go on from `facts`."""
        self._sizes = sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})
        self._least = least
        self._costs = Costs()
        self._unwatched = WATCH_EVERY
        self._promised = 1.0
        """Tokens a second with the last drafts, against plain steps."""
        self._repeating = False
        """Somebody may: else nobody need be looked at."""
        self.facts = facts

    def record(self) -> Record:
        """Of a row that may draft."""
        return Record(self._least)

    def allow(self, rows: Sequence[Drafter]) -> tuple[tuple[int, ...], bool]:
        """For the rows that decode, what each may draft, () if nobody; and whether to ask who repeats something."""
        if not any(row.record is not None for row in rows):
            return (), False
        drafts = self._best(rows)
        self._unwatched += 1
        watch = bool(drafts) or self._unwatched >= min(WATCH_EVERY, len(rows))
        if watch:
            self._unwatched = 0
        return drafts, watch

    def _best(self, rows: Sequence[Drafter]) -> tuple[int, ...]:
        """The size, and the rows by how much they promise, that bring the most tokens a second."""
        if not self._repeating:
            return ()
        active = [
            (place, row.record, row.room)
            for place, row in enumerate(rows)
            if row.record is not None and row.record.active and row.room > 0
        ]
        if not active:
            self._repeating = False
            return ()
        if not self._costs.comparable(len(rows), self._promised):
            return ()
        promised, chosen, size = self._promise([(record, room) for _, record, room in active], len(rows))
        self._promised = promised
        if promised <= MARGIN:
            return ()
        allowed = {active[one][0]: min(size, active[one][2]) for one in chosen}
        return tuple(allowed.get(place, 0) for place in range(len(rows)))

    def _promise(self, active: Sequence[tuple[Record, int]], rows: int) -> tuple[float, list[int], int]:
        """(tokens a second against plain steps, which of the active rows, size) at best, of all sizes and of each size's most
        promising rows, however many. A step takes longer only if somebody has something to draft."""
        chance, finds, room = np.array([(record.chance, record.finds, room) for record, room in active]).T
        sizes = self._costs.affordable(rows, self._sizes)
        # Right ones among so many drafted tokens: those before the first wrong one.
        expected = chance * (1 - chance ** np.minimum(np.array(sizes)[:, None], room)) / (1 - chance)
        order = np.argsort(-expected, axis=1, kind="stable")
        tokens = rows + np.cumsum(np.take_along_axis(finds * expected, order, axis=1), axis=1)
        nobody = np.cumprod((1 - finds)[order], axis=1)
        full = np.array([[self._costs.ratio(rows, size_of(size))] for size in sizes])
        gain = tokens / rows / (nobody * self._costs.ratio(rows, 0) + (1 - nobody) * full)
        best, last = np.unravel_index(np.argmax(gain), gain.shape)
        return float(gain[best, last]), order[best, : last + 1].tolist(), sizes[best]

    def answered(self, plan: Plan, stepped: Stepped, rows: Mapping[RowId, Drafter]) -> None:
        """`rows`: those that are still there."""
        said = {row: (tokens, right) for row, tokens, right in stepped.drafted}
        for row, most in zip(plan.decode, plan.drafts, strict=False):
            if most and row in rows and (record := rows[row].record) is not None:
                record.drafted(*said.get(row, (0, 0)))
        self._repeating = self._repeating or bool(stepped.matched)
        for row, matched in stepped.matched:
            if row in rows and (record := rows[row].record) is not None:
                record.repeats(matched)
        if plan.decode and not plan.prefill and not plan.admit and stepped.seconds > 0:
            longest = max((tokens for tokens, _ in said.values()), default=0)
            self._costs.measured(len(plan.decode), size_of(longest) if plan.drafts else None, stepped.seconds)
        parks = not plan.drafts and any(row.record is not None for row in rows.values())
        self._count(plan, stepped, parked=parks)

    def _count(self, plan: Plan, stepped: Stepped, *, parked: bool) -> None:
        facts = self.facts
        if parked and plan.decode:
            facts = attrs.evolve(facts, parked_s=facts.parked_s + stepped.seconds)
        if stepped.drafted:
            facts = attrs.evolve(
                facts,
                steps=facts.steps + 1,
                drafts=facts.drafts + len(stepped.drafted),
                drafted=facts.drafted + sum(tokens for _, tokens, _ in stepped.drafted),
                accepted=facts.accepted + sum(right for _, _, right in stepped.drafted),
                accepted_at=by_place(facts.accepted_at, (right for _, _, right in stepped.drafted)),
            )
        self.facts = facts


def by_place(before: tuple[int, ...], accepted: Iterable[int]) -> tuple[int, ...]:
    """How often the first drafted token was right, the second, and so on."""
    counts = list(before)
    for right in accepted:
        counts += [0] * (right - len(counts))
        counts[:right] = [count + 1 for count in counts[:right]]
    return tuple(counts)
