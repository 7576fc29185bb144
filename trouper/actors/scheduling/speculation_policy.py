"""Which rows draft, by which proposer and how much. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

import attrs

from trouper.actors.scheduling.draft_estimates import NEW_ROW, Acceptance, Costs, Record
from trouper.protocol.health import ProposerStats, SpeculationStats
from trouper.protocol.plans import Plan, ProposerName, RowId, Stepped

WATCH_EVERY = 8
"""Most plans between two `Plan.watch`; fewer with fewer rows. A watch costs microseconds a row."""
NGRAM: ProposerName = "ngram"
MIN_SPEED_UP = 1.05
"""Smallest expected speed-up over plain steps for drafts."""


class Drafter(Protocol):
    @property
    def records(self) -> Mapping[ProposerName, Record]:
        """Drafts by each permitted proposer; empty: never drafts."""

    @property
    def room(self) -> int:
        """Tokens that the answer takes beyond the next plan's one."""


@attrs.frozen
class Allowed:
    drafts: tuple[int, ...] = ()
    """Most tokens of each row; () if no row may draft."""
    proposers: tuple[ProposerName, ...] = ()
    """Each row's proposer; () if n-grams for all."""
    watch: bool = False
    """Whether the plan watches for rows that repeat something."""


class Option(NamedTuple):
    """One way for one row to draft."""

    row_index: int
    record: Record
    room: int

    def expect_tokens(self, size: int) -> float:
        rate = self.record.acceptance.rate
        return rate * (1 - rate ** min(size, self.room)) / (1 - rate) if rate < 1 else size


class Choice(NamedTuple):
    """Drafts of `size` tokens for some rows, and the expected speed-up over plain steps."""

    speed_up: float
    size: int
    name: ProposerName
    """The draft model or the head that runs passes, or "ngram"."""
    options: Sequence[Option]


# A row drafts n-grams once the output repeats earlier tokens. While no row does, plans ask
# periodically, at no cost to a step's length.
class Speculation:
    def __init__(self, max_tokens: int, min_match: int, stats: SpeculationStats) -> None:
        """Drafts have at most `max_tokens` tokens; n-grams match at least `min_match`. Counters
        continue from `stats`."""
        self._sizes = sorted(
            {min(1 << power, max_tokens) for power in range(max_tokens.bit_length() + 1)}
        )
        self._min_match = min_match
        self._costs = Costs()
        self._acceptance: defaultdict[ProposerName, Acceptance] = defaultdict(Acceptance)
        """Average of all rows, with which new rows begin."""
        self._rests: dict[ProposerName, tuple[int, int]] = {}
        """Step of the last draft, and `Record.rest_steps` of its row, which a new row continues."""
        self._step = 0
        self._unwatched = WATCH_EVERY
        self._repeating = False
        """Whether n-grams are examined at all."""
        self.stats = stats

    def records(self, names: Iterable[ProposerName]) -> dict[ProposerName, Record]:
        records = dict[ProposerName, Record]()
        for name in names:
            record = Record(
                name, self._min_match, self._acceptance[name].scaled(), drafted_at=self._step
            )
            if record.resting and name in self._rests:
                # Otherwise each answer would try a wrong drafter again.
                record.drafted_at, rest_steps = self._rests[name]
                record.rest_steps = NEW_ROW * rest_steps
            records[name] = record
        return records

    def allow(self, rows: Sequence[Drafter]) -> Allowed:
        if not any(row.records for row in rows):
            return Allowed()
        best = self._best(rows)
        self._unwatched += 1
        watch = bool(best.drafts) or self._unwatched >= min(WATCH_EVERY, len(rows))
        watch = watch and any("ngram" in row.records for row in rows)
        if watch:
            self._unwatched = 0
        return attrs.evolve(best, watch=True) if watch else best

    def _best(self, rows: Sequence[Drafter]) -> Allowed:
        """Return the drafts with the highest expected tokens a second."""
        options = [
            Option(index, record, room)
            for index, row in enumerate(rows)
            for record in row.records.values()
            # The cheapest condition is first, since mostly no row repeats anything.
            if (self._repeating or record.name != "ngram")
            and record.active(self._step)
            and (room := row.room - record.undrafted) > 0
        ]
        names = {option.record.name for option in options}
        self._repeating = "ngram" in names
        if not options:
            return Allowed()
        # All rows wait for the passes of a draft model or a head, so one of the two at most runs.
        choice = max(
            (
                self._choose(
                    name,
                    [each for each in options if each.record.name in ("ngram", name)],
                    len(rows),
                )
                for name in sorted(names | {NGRAM}, key=str)
            ),
            key=lambda choice: choice.speed_up,
        )
        if choice.speed_up <= MIN_SPEED_UP:
            return Allowed()
        if self._costs.needs_plain(choice.name, len(rows), choice.size):
            return Allowed()
        drafts, proposers = [0] * len(rows), list[ProposerName](["ngram"] * len(rows))
        for index, record, room in choice.options:
            drafts[index] = 1 if record.retrying else min(choice.size, room)
            proposers[index] = record.name
        return Allowed(tuple(drafts), () if set(proposers) == {"ngram"} else tuple(proposers))

    def _choose(self, name: ProposerName, options: Sequence[Option], rows: int) -> Choice:
        """Choose the size and the number of most promising rows. `name`: the only proposer besides
        n-grams."""
        best = Choice(1.0, 0, "ngram", ())
        no_draft_ratio = self._costs.ratio("ngram", rows, 0)
        for size in self._costs.affordable(name, rows, self._sizes):
            ratios = {used: self._costs.ratio(used, rows, size) for used in ("ngram", name)}
            ordered = _order_options(options, size)
            tokens, no_draft = float(rows), 1.0
            used: ProposerName = "ngram"
            for count, (expected, option) in enumerate(ordered, 1):
                record = option.record
                tokens += record.finds * expected
                # A step takes longer only if some row has a draft.
                no_draft *= 1 - record.finds
                used = name if record.name == name else used
                seconds = no_draft * no_draft_ratio + (1 - no_draft) * ratios[used]
                if tokens > best.speed_up * rows * seconds:
                    chosen = [each for _, each in ordered[:count]]
                    best = Choice(tokens / (rows * seconds), size, used, chosen)
        return best

    def answered(self, plan: Plan, stepped: Stepped, rows: Mapping[RowId, Drafter]) -> None:
        """Learn from a result. `rows` still exist."""
        self._step += 1
        if plan.drafts:
            self._learn(plan, stepped, rows)
        self._repeating = self._repeating or bool(stepped.matched)
        for row, matched in stepped.matched:
            if row in rows and (record := rows[row].records.get("ngram")) is not None:
                record.repeats(matched, self._step)
        alone = plan.decode and not plan.prefill and not plan.admit
        if alone and stepped.seconds > 0 and not stepped.preparing:
            self._measure(plan, stepped)
        parks = not plan.drafts and any(row.records for row in rows.values())
        if parks and plan.decode:
            self.stats = attrs.evolve(self.stats, parked_s=self.stats.parked_s + stepped.seconds)
        self.stats = counted(self.stats, plan, stepped)

    def _learn(self, plan: Plan, stepped: Stepped, rows: Mapping[RowId, Drafter]) -> None:
        drafted = {row: (tokens, accepted) for row, tokens, accepted in stepped.drafted}
        names = plan.proposer_of
        counts: dict[ProposerName, tuple[int, int]] = {}
        for row, max_tokens in zip(plan.decode, plan.drafts, strict=True):
            record = rows[row].records.get(names[row]) if max_tokens and row in rows else None
            if record is None:
                continue
            tokens, accepted = drafted.get(row, (0, 0))
            record.learn(tokens, accepted, self._step)
            if tokens:
                self._rests[record.name] = self._step, record.rest_steps
                before = counts.get(record.name, (0, 0))
                counts[record.name] = before[0] + accepted, before[1] + (accepted < tokens)
        for name, (accepted, rejected) in counts.items():
            self._acceptance[name].add(accepted, rejected)

    def _measure(self, plan: Plan, stepped: Stepped) -> None:
        rows = len(plan.decode)
        if not plan.drafts:
            self._costs.add_plain(rows, stepped.seconds)
            return
        drafted = {row for row, _, _ in stepped.drafted}
        names = {name for row, name in plan.proposer_of.items() if row in drafted} - {"ngram"}
        longest = max((tokens for _, tokens, _ in stepped.drafted), default=0)
        if len(names) < 2:
            name = names.pop() if names else NGRAM
            self._costs.add_drafted(name, rows, longest, stepped.seconds)


def _order_options(options: Sequence[Option], size: int) -> list[tuple[float, Option]]:
    """Return each row's better option with expected tokens, most first."""
    better: list[tuple[float, Option]] = []
    for option in options:
        expected = option.expect_tokens(size)
        if better and better[-1][1].row_index == option.row_index:
            if option.record.finds * expected <= better[-1][1].record.finds * better[-1][0]:
                continue
            better.pop()
        better.append((expected, option))
    return sorted(better, key=itemgetter(0), reverse=True)


def counted(stats: SpeculationStats, plan: Plan, stepped: Stepped) -> SpeculationStats:
    if not stepped.drafted:
        return stats
    names, by_proposer = plan.proposer_of, dict(stats.by_proposer)
    for row, tokens, right in stepped.drafted:
        before = by_proposer.get(names[row], ProposerStats())
        by_proposer[names[row]] = ProposerStats(
            drafts=before.drafts + 1,
            drafted=before.drafted + tokens,
            accepted=before.accepted + right,
        )
    return attrs.evolve(
        stats,
        steps=stats.steps + 1,
        drafts=stats.drafts + len(stepped.drafted),
        drafted=stats.drafted + sum(tokens for _, tokens, _ in stepped.drafted),
        accepted=stats.accepted + sum(right for _, _, right in stepped.drafted),
        accepted_at=by_position(stats.accepted_at, (right for _, _, right in stepped.drafted)),
        by_proposer=by_proposer,
    )


def by_position(before: tuple[int, ...], accepted: Iterable[int]) -> tuple[int, ...]:
    """Add accepted counts by index in a draft."""
    counts = list(before)
    for right in accepted:
        counts += [0] * (right - len(counts))
        counts[:right] = [count + 1 for count in counts[:right]]
    return tuple(counts)
