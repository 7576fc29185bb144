"""Estimates of draft acceptance and of the duration of steps with drafts. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from statistics import median, median_low
from types import MappingProxyType

import attrs

from trouper.protocol.plans import ProposerName

MEMORY = 2000
"""Steps after which an estimate expires: nothing forbids drafts for ever."""

# -- acceptance ----------------------------------------------------------------------------------

DECAY = 0.9
"""Decay of the accepted and rejected counts with each draft."""
UNKNOWN = (3.0, 1.0)
"""Initial accepted and rejected counts of a proposer."""
RETRY = (0.9, 0.3)
"""Counts after a rest: two rejected drafts rest again."""
MIN_ACCEPTANCE = 0.25
"""Below, a row rests: a draft would bring a third of a token at most."""
TRUSTED_DRAFTS = 8
"""Drafts after which a row's earlier failures no longer count."""
IDLE_STEPS = 16
"""Steps until n-grams without a draft or repetition end; also the first rest."""
MAX_CAUTION = 16
"""Largest factor of the match, or of the rest, after rejected drafts."""
NEW_ROW = 4
"""Factor of the rest that a new row continues: its drafter has to read the whole prompt first."""


@attrs.define(eq=False)
class Acceptance:
    """Moving average of the accepted part of drafted tokens."""

    accepted: float = UNKNOWN[0]
    rejected: float = UNKNOWN[1]

    @property
    def rate(self) -> float:
        return self.accepted / (self.accepted + self.rejected)

    def add(self, accepted: int, rejected: int) -> None:
        self.accepted = DECAY * self.accepted + accepted
        self.rejected = DECAY * self.rejected + rejected

    def scaled(self) -> Acceptance:
        """Return the rate with the weight of `UNKNOWN`, to start another row."""
        weight = sum(UNKNOWN)
        return Acceptance(weight * self.rate, weight * (1 - self.rate))


@attrs.define(eq=False)
class Record:
    name: ProposerName
    min_match: int
    acceptance: Acceptance
    finds: float = 1.0
    """Moving average of how often a permitted draft exists."""
    caution: int = 1
    """Factor of `min_match` for n-grams. Doubles after rejected drafts."""
    rest_steps: int = IDLE_STEPS
    num_drafts: int = 0
    """Drafts since the last rest."""
    drafted_at: int = 0
    matched: int = 0
    """Half of the longest match: double evidence lets the row begin anew."""
    active_until: int = 0
    """Step until which the row drafts n-grams."""
    undrafted: int = 0
    """Tokens at the answer's end behind a draft model's context."""
    retrying: bool = False
    """Whether passes are tried again after a rest: drafts have one token until one is accepted."""

    def active(self, step: int) -> bool:
        """Whether the row may draft. Ends a rest that is over."""
        if step - self.drafted_at >= self.rest_steps:
            self.rest_steps = min(2 * self.rest_steps, MAX_CAUTION * IDLE_STEPS)
            self.acceptance, self.drafted_at = Acceptance(*RETRY), step
            self.num_drafts, self.retrying = 0, self.name != "ngram"
        return step < self.active_until if self.name == "ngram" else not self.resting

    @property
    def resting(self) -> bool:
        """Whether passes were rejected too often."""
        return self.name != "ngram" and self.acceptance.rate < MIN_ACCEPTANCE

    def repeats(self, matched: int, step: int) -> None:
        """The row's last `matched` tokens occur earlier in the text."""
        if matched >= self.min_match * self.caution:
            if matched >= 2 * self.matched:
                if self.acceptance.rate < Acceptance(*RETRY).rate:
                    self.acceptance = Acceptance(*RETRY)
                self.matched = matched
            self.active_until = step + IDLE_STEPS

    def learn(self, drafted: int, accepted: int, step: int) -> None:
        """Learn from a step with permission to draft. `drafted` 0: no draft existed."""
        self.finds = DECAY * self.finds + (1 - DECAY) * (drafted > 0)
        if not drafted:
            return
        self.acceptance.add(accepted, int(accepted < drafted))
        self.num_drafts += 1
        self.retrying = self.retrying and not accepted
        self.drafted_at, self.active_until = step, step + IDLE_STEPS
        if self.acceptance.rate < MIN_ACCEPTANCE:
            self.caution = min(2 * self.caution, MAX_CAUTION)
            self.active_until = step
        elif self.num_drafts > TRUSTED_DRAFTS:
            self.caution, self.rest_steps = 1, IDLE_STEPS


Records = Mapping[ProposerName, Record]
UNCHOSEN: Records = MappingProxyType({})
"""Records of a sequence before the choice of proposers."""

# -- costs ---------------------------------------------------------------------------------------

AGREE = 1.25
"""Largest ratio of two plain steps under equal load of the machine."""
MIN_RATIO = 0.9
"""Smallest plausible ratio: below, the plain step was measured in a busy moment."""
SAMPLES = 5
"""Samples per median. After n samples, n² steps with drafts follow until the next plain step."""
Key = tuple[ProposerName, int]
"""Proposer that runs passes ("ngram": none does), and the number of rows (`round_rows`)."""


@attrs.define(eq=False)
class Ratio:
    """Samples of a step's duration, in plain steps."""

    samples: deque[float] = attrs.field(factory=lambda: deque(maxlen=SAMPLES))
    median: float = 1.0
    sampled_at: int = 0

    def add(self, sample: float, step: int) -> None:
        if step - self.sampled_at > MEMORY:
            self.samples.clear()
        self.samples.append(sample)
        self.median, self.sampled_at = median_low(self.samples), step


class Costs:
    """Durations of steps with drafts, relative to the plain steps around with as many rows. If
    those two differ, the steps between are discarded: the machine's load has changed."""

    def __init__(self) -> None:
        self._ratios: dict[Key, dict[int, Ratio]] = {}
        """By the length of the longest draft (`round_size`)."""
        self._step = 0
        self._plain: tuple[int, float] | None = None
        """Of the last plain step with this number of rows."""
        self._drafted: defaultdict[tuple[Key, int], list[float]] = defaultdict(list)
        """Steps with drafts since then."""
        self._since_plain = 0
        self._unsure = False
        """Whether another plain step must settle a disagreement."""

    def add_plain(self, rows: int, seconds: float) -> None:
        """Learn from a step without permitted drafts."""
        self._step += 1
        before_s = self._seconds_before(rows)
        self._unsure = before_s is not None and not before_s / AGREE <= seconds <= before_s * AGREE
        if before_s is not None and not self._unsure:
            for (key, size), durations in self._drafted.items():
                ratio = self._ratios.setdefault(key, {}).setdefault(size, Ratio())
                ratio.add(2 * median(durations) / (before_s + seconds), self._step)
        self._plain, self._since_plain = (rows, seconds), 0
        self._drafted.clear()

    def add_drafted(self, name: ProposerName, rows: int, longest: int, seconds: float) -> None:
        """Learn from a step with permitted drafts, the longest of `longest` tokens."""
        self._step += 1
        self._since_plain += 1
        before_s = self._seconds_before(rows)
        if before_s is None:
            self._plain = None
            self._drafted.clear()
        elif seconds < MIN_RATIO * before_s:
            self._unsure = True
            self._drafted.clear()
        else:
            self._drafted[(name, round_rows(rows)), round_size(longest)].append(seconds)

    def _seconds_before(self, rows: int) -> float | None:
        return self._plain[1] if self._plain is not None and self._plain[0] == rows else None

    def needs_plain(self, name: ProposerName, rows: int, size: int) -> bool:
        """Whether a plain step has to come first: the sooner, the fewer samples."""
        num_samples = self._usable_samples(name, rows).get(round_size(size), (0, 0.0))[0]
        if self._unsure or self._since_plain >= max(1, num_samples**2):
            return True
        return num_samples == 0 and self._seconds_before(rows) is None

    def ratio(self, name: ProposerName, rows: int, size: int) -> float:
        """Duration in plain steps. Without samples, a lower bound from shorter drafts, n-grams or,
        in proportion, longer drafts."""
        size = round_size(size)
        samples = self._usable_samples(name, rows)
        if size in samples:
            return samples[size][1]
        bounds = [1.0]
        for other, (_, ratio) in (*samples.items(), *self._usable_samples("ngram", rows).items()):
            bounds.append(ratio if other <= size else 1 + (ratio - 1) * size / other)
        return max(bounds)

    def affordable(self, name: ProposerName, rows: int, sizes: Iterable[int]) -> list[int]:
        """Return sizes up to four times the largest sample, for trials of bounded cost."""
        largest = max(self._usable_samples(name, rows), default=1)
        return [size for size in sizes if size <= 4 * max(largest, 1)]

    def _usable_samples(self, name: ProposerName, rows: int) -> dict[int, tuple[int, float]]:
        """Return number and ratio per size with at least two samples."""
        ratios = self._ratios.get((name, round_rows(rows)), {})
        return {
            size: (len(ratio.samples), ratio.median)
            for size, ratio in ratios.items()
            if len(ratio.samples) > 1 and self._step - ratio.sampled_at <= MEMORY
        }


def round_rows(rows: int) -> int:
    """Round up: exact up to four, then to a power of two."""
    return rows if rows <= 4 else 1 << (rows - 1).bit_length()


def round_size(drafted: int) -> int:
    """Round a draft's length up to a power of two; 0: no draft."""
    return 1 << (drafted - 1).bit_length() if drafted else 0
