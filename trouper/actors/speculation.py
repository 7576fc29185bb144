"""When drafts pay: measured acceptance against the measured cost of a step that verifies them. Pure.

A row drafts nothing until it repeats something: while all are quiet the engine is only asked now and then who does, which
costs no step anything. What a step with drafts costs, in plain steps, depends on the device and on how many rows are in
it; so it is measured for each size, and what was not measured yet is tried, since an estimate that forbids is never put
right. An estimate that forbids fades, so that what one slow step has said is not for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Protocol

import attrs

from trouper.protocol.health import SpeculationFacts
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
REFRESH = 48
"""Steps with drafts, after which a plain one is measured again."""
FADES = 2000
"""Steps, after which half of what a measurement said above a plain step is forgotten."""
PRIOR = 0.02
"""Of a plain step: what a drafted token costs before anything was measured. Optimists measure."""
LEAP = 4
"""The next size to try is at most so many times one that was measured."""
SAMPLES, SURE = 9, 5
"""The last of them are kept. Of fewer than `SURE` the fastest counts: a busy moment must not forbid what was hardly tried."""
Rows = int
Size = int
"""Most tokens that a row of the step drafted, rounded up to a power of two; 0: it was asked, and nobody drafted."""


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

    def expected(self, drafted: int) -> float:
        """Right ones among so many drafted tokens: those before the first wrong one."""
        chance = self.chance
        return chance * (1 - chance**drafted) / (1 - chance)

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


@attrs.define(eq=False)
class Times:
    """The last steps of one kind."""

    seconds: deque[float] = attrs.field(factory=lambda: deque(maxlen=SAMPLES))
    middle: float = 0.0
    at: int = 0
    """Step of the last one."""
    new: bool = True

    def add(self, seconds: float, step: int) -> None:
        """The first says little: a device compiles for it, buffers grow."""
        if not self.new:
            self.seconds.append(seconds)
            self.middle = median(self.seconds) if len(self.seconds) >= SURE else min(self.seconds)
        self.new, self.at = False, step


class Costs:
    """What steps take, by how many rows decode and how much they draft."""

    def __init__(self) -> None:
        self._plain: dict[Rows, Times] = {}
        self._ratios: dict[tuple[Rows, Size], Times] = {}
        self._steps = 0
        self.since_plain = 0
        """Steps with drafts since the last plain one."""

    def measured(self, rows: int, size: Size | None, seconds: float) -> None:
        """One step. `size` None: nobody was asked."""
        self._steps += 1
        bucket = bucket_of(rows)
        if size is None:
            self.since_plain = 0
            self._plain.setdefault(bucket, Times()).add(seconds, self._steps)
            return
        self.since_plain += 1
        plain = self._plain.get(bucket)
        if plain is not None and plain.middle:
            self._ratios.setdefault((bucket, size), Times()).add(seconds / plain.middle, self._steps)

    def known(self, rows: int) -> bool:
        """Whether a plain step of so many rows was measured: else nothing can be compared."""
        plain = self._plain.get(bucket_of(rows))
        return plain is not None and plain.middle > 0

    def affordable(self, rows: int, sizes: Sequence[int]) -> list[int]:
        """Those that are no leap beyond what was measured with so many rows: a try should not cost dozens of steps."""
        bucket = bucket_of(rows)
        tried = max(
            (size for (some, size), times in self._ratios.items() if some == bucket and times.middle), default=1
        )
        return [size for size in sizes if size <= LEAP * max(tried, 1)]

    def ratio(self, rows: int, size: Size) -> float:
        """In plain steps. Of what was not measured, the least that it can be: fewer rows and shorter drafts take no more."""
        bucket = bucket_of(rows)
        own = self._ratios.get((bucket, size))
        if own is not None and own.middle:
            return self._faded(own)
        guesses = [1 + PRIOR * size]
        for (some, other), times in self._ratios.items():
            if not times.middle:
                continue
            if some <= bucket and other <= size:
                guesses.append(self._faded(times))
            elif some == bucket:
                guesses.append(1 + (self._faded(times) - 1) * size / other)
        return max(guesses)

    def _faded(self, times: Times) -> float:
        age = self._steps - times.at
        kept: float = 0.5 ** (age / FADES)
        return 1 + (times.middle - 1) * kept


def bucket_of(rows: int) -> Rows:
    """Up to four rows by their number, more by powers of two."""
    return rows if rows <= 4 else 1 << (rows - 1).bit_length()


def size_of(drafted: int) -> Size:
    return 1 << (drafted - 1).bit_length() if drafted else 0


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

    def __init__(self, most: int, least: int, facts: SpeculationFacts) -> None:
        """At most `most` tokens a draft; a match of `least` tokens is worth a try. Counters go on from `facts`."""
        self._sizes = sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})
        self._least = least
        self._costs = Costs()
        self._unwatched = WATCH_EVERY
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
        active = [
            (place, row.record, row.room)
            for place, row in enumerate(rows)
            if row.record is not None and row.record.active and row.room > 0
        ]
        if not active or not self._costs.known(len(rows)) or self._costs.since_plain >= REFRESH:
            return ()
        best, chosen, size = MARGIN, list[tuple[int, Record, int]](), 0
        for drafted in self._costs.affordable(len(rows), self._sizes):
            promising = sorted(active, key=lambda each: -each[1].expected(min(drafted, each[2])))
            gain, some = self._gain(promising, len(rows), drafted)
            if gain > best:
                best, chosen, size = gain, promising[:some], drafted
        if not chosen:
            return ()
        allowed = {place: min(size, room) for place, _, room in chosen}
        return tuple(allowed.get(place, 0) for place in range(len(rows)))

    def _gain(self, promising: Sequence[tuple[int, Record, int]], rows: int, drafted: int) -> tuple[float, int]:
        """(tokens a second against plain steps, of how many of the most promising rows) at best. A step takes longer only
        if somebody has something to draft."""
        asked, full = self._costs.ratio(rows, 0), self._costs.ratio(rows, size_of(drafted))
        tokens, nobody, best, some = float(rows), 1.0, 0.0, 0
        for count, (_, record, room) in enumerate(promising, 1):
            tokens += record.finds * record.expected(min(drafted, room))
            nobody *= 1 - record.finds
            gain = tokens / rows / (nobody * asked + (1 - nobody) * full)
            if gain > best:
                best, some = gain, count
        return best, some

    def answered(self, plan: Plan, stepped: Stepped, rows: Mapping[RowId, Drafter]) -> None:
        """`rows`: those that are still there."""
        said = {row: (tokens, right) for row, tokens, right in stepped.drafted}
        for row, most in zip(plan.decode, plan.drafts, strict=False):
            if most and row in rows and (record := rows[row].record) is not None:
                record.drafted(*said.get(row, (0, 0)))
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
