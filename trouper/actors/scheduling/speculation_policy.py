"""Speculation policy: which rows draft, by what and how much. Measured acceptance (`draft_records`)
against the measured cost of a step that verifies drafts, and of the passes of a draft model or an
MTP head (`draft_costs`). Pure.

A row drafts nothing from its own text until its output repeats earlier tokens. While no row does,
the engine is only asked periodically which rows repeat something, which does not lengthen a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from trouper.actors.scheduling.draft_costs import Costs, size_of
from trouper.actors.scheduling.draft_records import WATCH_EVERY, Acceptance, Priors, Record
from trouper.protocol.health import ProposerStats, SpeculationStats
from trouper.protocol.plans import Plan, ProposerName, RowId, Stepped

MIN_SPEED_UP = 1.05
"""Minimum expected speed-up over plain steps for which drafts are allowed."""


class Drafter(Protocol):
    """The part of a row that this policy reads."""

    @property
    def records(self) -> Mapping[ProposerName, Record]:
        """History of the row's drafts by each proposer that it may use; empty: the row never
        drafts."""

    @property
    def room(self) -> int:
        """Number of tokens, beyond the one of the next plan, for which the answer has room."""


@attrs.frozen
class Allowed:
    """What the decoding rows of a plan may draft."""

    drafts: tuple[int, ...] = ()
    """Maximum number of tokens of each row; () if no row may draft."""
    proposers: tuple[ProposerName, ...] = ()
    """What drafts for each row; () if n-grams do for all."""
    watch: bool = False
    """Whether the plan watches for rows that repeat something."""


class DraftOption(NamedTuple):
    """One way for one row to draft."""

    row_index: int
    record: Record
    room: int


class Promise(NamedTuple):
    """What drafts are expected to bring: the speed-up over plain steps of these options with drafts
    of `size` tokens."""

    speed_up: float
    chosen: Sequence[DraftOption]
    size: int


class Speculation:
    """Decides for each plan how much each row drafts and by what, and learns from each result."""

    def __init__(self, max_tokens: int, min_match: int, stats: SpeculationStats) -> None:
        """Maximum draft of `max_tokens` tokens; minimum match of `min_match` tokens. Counters
        continue from `stats`."""
        self._sizes = sorted(
            {min(1 << power, max_tokens) for power in range(max_tokens.bit_length() + 1)}
        )
        self._min_match = min_match
        self._costs, self._priors = Costs(), Priors()
        self._steps = 0
        self._unwatched = WATCH_EVERY
        self._promised = 1.0
        """Expected speed-up of the last drafts over plain steps."""
        self._repeating = False
        """Whether any row may repeat something. If not, n-grams are not examined."""
        self.stats = stats

    def records(self, names: Iterable[ProposerName]) -> dict[ProposerName, Record]:
        """New histories, for a row that may draft by these proposers."""
        return {name: Record.of(name, self._min_match) for name in names}

    def allow(self, rows: Sequence[Drafter]) -> Allowed:
        """Decide about the next plan, in which these rows decode."""
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
        """The drafts with the highest expected tokens a second: one size, for the most promising
        rows, each by its better proposer."""
        options = [
            DraftOption(index, record, room)
            for index, row in enumerate(rows)
            for record in row.records.values()
            if (self._repeating or record.name != "ngram")  # First: mostly no row repeats anything.
            and record.active(self._steps)
            and (room := row.room - record.undrafted) > 0
        ]
        ngrams = [option for option in options if option.record.name == "ngram"]
        self._repeating = bool(ngrams)
        if not options or not self._costs.comparable(len(rows), self._promised):
            return Allowed()
        # One proposer at most runs passes in a step, for which all rows wait: with it and without.
        names = {option.record.name for option in options} - {"ngram"}
        subsets = [
            [option for option in options if option.record.name in ("ngram", name)]
            for name in sorted(names)
        ]
        promises = [self._promise(some, len(rows)) for some in (*subsets, ngrams) if some]
        promise = max(promises, key=lambda promise: promise.speed_up)
        self._promised = promise.speed_up
        if promise.speed_up <= MIN_SPEED_UP:
            return Allowed()
        drafts, chosen = [0] * len(rows), list[ProposerName](["ngram"] * len(rows))
        for index, record, room in promise.chosen:
            if not drafts[index]:  # A row's better proposer comes first.
                drafts[index], chosen[index] = min(promise.size, room), record.name
        return Allowed(tuple(drafts), tuple(chosen) if set(chosen) != {"ngram"} else ())

    def _promise(self, options: Sequence[DraftOption], rows: int) -> Promise:
        """The best of all sizes and, for each size, of all numbers of its most promising options. A
        step takes longer only if some row has something to draft; a draft model or a head always
        has, and runs a pass for each token. Options are by n-grams, and by one such proposer."""
        chance = np.array([record.chance(self._priors, self._steps) for _, record, _ in options])
        finds, room = np.array([(record.finds, room) for _, record, room in options]).T
        modelled = np.array([record.name != "ngram" for _, record, _ in options])
        name = next((record.name for _, record, _ in options if record.name != "ngram"), None)
        draft_pass = self._costs.draft_pass(name, rows) if name else 0.0
        sizes = self._costs.affordable(rows, self._sizes)
        # Expected number of accepted tokens of a draft: those before the first rejected one.
        expected = (
            chance * (1 - chance ** np.minimum(np.array(sizes)[:, None], room)) / (1 - chance)
        )
        _only_better(expected, finds, [option.row_index for option in options])
        order = np.argsort(-expected, axis=1, kind="stable")
        tokens = rows + np.cumsum(np.take_along_axis(finds * expected, order, axis=1), axis=1)
        nobody = np.cumprod((1 - finds)[order], axis=1)
        passes = np.logical_or.accumulate(modelled[order], axis=1) * np.array(sizes)[:, None]
        full = np.array([[self._costs.ratio(rows, size_of(size))] for size in sizes])
        taken = nobody * self._costs.ratio(rows, 0) + (1 - nobody) * full + passes * draft_pass
        gain = tokens / rows / taken
        best, last = np.unravel_index(np.argmax(gain), gain.shape)
        return Promise(
            float(gain[best, last]),
            [options[index] for index in order[best, : last + 1]],
            sizes[best],
        )

    def answered(self, plan: Plan, stepped: Stepped, rows: Mapping[RowId, Drafter]) -> None:
        """Learn from the result of a plan. `rows`: the rows that still exist."""
        self._steps += 1
        if plan.drafts:
            self._learn(plan, stepped, rows)
        self._repeating = self._repeating or bool(stepped.matched)
        for row, matched in stepped.matched:
            if row in rows and (record := rows[row].records.get("ngram")) is not None:
                record.repeats(matched)
        alone = plan.decode and not plan.prefill and not plan.admit
        if alone and stepped.seconds > 0 and not stepped.preparing:
            self._measure(plan, stepped)
        parks = not plan.drafts and any(row.records for row in rows.values())
        if parks and plan.decode:
            self.stats = attrs.evolve(self.stats, parked_s=self.stats.parked_s + stepped.seconds)
        self.stats = counted(self.stats, plan, stepped)

    def _learn(self, plan: Plan, stepped: Stepped, rows: Mapping[RowId, Drafter]) -> None:
        """Learn how many drafted tokens were right: those of each row, and those of all rows by
        each proposer."""
        answers = {row: (tokens, right) for row, tokens, right in stepped.drafted}
        names = plan.proposer_of
        counts: dict[Acceptance, tuple[int, int]] = {}
        for row, max_tokens in zip(plan.decode, plan.drafts, strict=True):
            record = rows[row].records.get(names[row]) if max_tokens and row in rows else None
            if record is None:
                continue
            tokens, right = answers.get(row, (0, 0))
            if tokens:
                prior = self._priors.of(record.name, record.matched)
                before = counts.get(prior, (0, 0))
                counts[prior] = before[0] + right, before[1] + (right < tokens)
            record.drafted(tokens, right, self._priors, self._steps)
        for prior, (rights, wrongs) in counts.items():
            prior.add(rights, wrongs, self._steps)

    def _measure(self, plan: Plan, stepped: Stepped) -> None:
        """Learn what the step took, and what the passes of a draft model or a head took of that."""
        rows, names = len(plan.decode), {*plan.proposers} - {"ngram"}
        if not plan.drafts:
            self._costs.measured(rows, None, stepped.seconds)
            return
        sizes = zip(plan.drafts, plan.proposers, strict=False)
        passes = max((size for size, name in sizes if name in names), default=0)
        longest = max((tokens for _, tokens, _ in stepped.drafted), default=0)
        self._costs.measured(
            rows, size_of(longest), stepped.seconds - (stepped.draft_s if passes else 0.0)
        )
        for name in names if passes and len(names) == 1 else ():
            self._costs.measured_passes(name, rows, stepped.draft_s / passes)


def _only_better(
    expected: NDArray[np.float64], finds: NDArray[np.float64], rows: Sequence[int]
) -> None:
    """Expect nothing of the worse of a row's two proposers, for each size. expected (sizes,
    options); finds (options,). `rows`: the row of each option; those of one row are neighbours."""
    for other in range(1, len(rows)):
        one = other - 1
        if rows[one] == rows[other]:
            worse = finds[other] * expected[:, other] <= finds[one] * expected[:, one]
            expected[worse, other] = 0
            expected[~worse, one] = 0


def counted(stats: SpeculationStats, plan: Plan, stepped: Stepped) -> SpeculationStats:
    """Add the drafts of a step to the counters."""
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
    """Counts of accepted tokens by their index in a draft, with those of `accepted` added."""
    counts = list(before)
    for right in accepted:
        counts += [0] * (right - len(counts))
        counts[:right] = [count + 1 for count in counts[:right]]
    return tuple(counts)
