"""What is known of drafts: how often those of a row were right, and those of all rows by the same
proposer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from trouper.actors.scheduling.draft_costs import MAX_AGE
from trouper.protocol.plans import ProposerName

WATCH_EVERY = 8
"""Maximum number of plans between two `Plan.watch` (or the number of rows, if that is smaller). A
watch costs a row some microseconds, and an answer that begins to copy is found within this many
tokens."""
IDLE_LIMIT = 2 * WATCH_EVERY
"""Number of steps without a draft after which a row counts as not repeating; first rest of a row
from a draft model or a head."""
PRIOR = (3.0, 1.0)
"""Prior counts of (accepted, rejected) drafted tokens of a proposer of which nothing is known, and
the weight of what other rows' drafts show: few enough that a row's own drafts decide after some
steps."""
DECAY = 0.85
"""Decay of the counts with each draft."""
MIN_ACCEPTANCE = 0.3
"""Chance of a drafted token below which a row rests: drafts would bring less than half a token,
however long they were. A row that is always wrong falls below it within seven drafts, also where
others are right."""
MAX_REQUIRED_MATCH = 64
"""Upper bound of the match that a row needs before it drafts, and of the steps for which it rests
from a draft model or a head."""


def believed(age: int) -> float:
    """The part of counts of `age` steps ago that still counts, so that they forbid nothing for
    ever."""
    kept: float = 0.5 ** (age / MAX_AGE)
    return kept


@attrs.define(eq=False)
class Acceptance:
    """How often the last drafts of all rows were right: the prior of rows that begin to draft."""

    right: float = 0.0
    wrong: float = 0.0
    at: int = 0
    """Step of the last draft."""

    def chance(self, step: int) -> float:
        kept = believed(step - self.at)
        return (kept * self.right + PRIOR[0]) / (kept * (self.right + self.wrong) + sum(PRIOR))

    def add(self, right: int, wrong: int, step: int) -> None:
        self.right, self.wrong, self.at = (
            DECAY * self.right + right,
            DECAY * self.wrong + wrong,
            step,
        )


class Priors:
    """The acceptance of each proposer; of prompt lookup by the length of the match, to its power of
    two."""

    def __init__(self) -> None:
        self._found: dict[tuple[ProposerName, int], Acceptance] = {}

    def of(self, name: ProposerName, matched: int) -> Acceptance:
        return self._found.setdefault((name, matched.bit_length()), Acceptance())


@attrs.define(eq=False)
class Record:
    """History of one row's drafts by one proposer."""

    name: ProposerName
    required_match: int
    """Number of the row's last tokens that must have occurred before, for the row to draft; for a
    draft model or a head, number of steps that it has rested."""
    min_match: int = attrs.field(
        default=attrs.Factory(lambda record: record.required_match, takes_self=True)
    )
    matched: int = 0
    """The match with which the row began to draft."""
    right: float = 0.0
    wrong: float = 0.0
    allowed_steps: float = 1.0
    found: float = 1.0
    quiet: int = IDLE_LIMIT
    """Steps since the row last drafted or repeated something."""
    at: int = 0
    """Step of the last draft."""
    undrafted: int = 0
    """Number of tokens at the end of the answer that the proposer cannot draft: they lie behind a
    draft model's context."""

    @classmethod
    def of(cls, name: ProposerName, min_match: int) -> Record:
        return cls(name, min_match) if name == "ngram" else cls(name, IDLE_LIMIT // 2, quiet=0)

    def active(self, step: int) -> bool:
        """Whether the row may draft."""
        return self.quiet < IDLE_LIMIT or (
            self.name != "ngram" and step - self.at >= self.required_match
        )

    def chance(self, priors: Priors, step: int) -> float:
        """Probability that the next drafted token is accepted."""
        weight, kept = sum(PRIOR), believed(step - self.at)
        prior = priors.of(self.name, self.matched).chance(step)
        return (kept * self.right + weight * prior) / (kept * (self.right + self.wrong) + weight)

    @property
    def finds(self) -> float:
        """Share of steps in which the row had something to draft when it was allowed to."""
        return self.found / self.allowed_steps

    def repeats(self, matched: int) -> None:
        """The row's last tokens occurred before."""
        if matched >= self.required_match:
            self.quiet, self.matched = 0, matched

    def drafted(self, tokens: int, right: int, priors: Priors, step: int) -> None:
        """Learn from a step in which the row was allowed to draft; 0 tokens: the row had nothing to
        draft."""
        self.allowed_steps = DECAY * self.allowed_steps + 1
        self.found = DECAY * self.found + (tokens > 0)
        self.quiet += 1
        if not tokens:
            return
        kept, self.quiet, self.at = DECAY * believed(step - self.at), 0, step
        self.right = kept * self.right + right
        self.wrong = kept * self.wrong + (right < tokens)
        if self.chance(priors, step) < MIN_ACCEPTANCE:
            self.required_match = min(2 * self.required_match, MAX_REQUIRED_MATCH)
            self.right = self.wrong = 0.0
            self.quiet = IDLE_LIMIT
        elif self.wrong < 0.1 * self.right:
            self.required_match = self.min_match


Records = Mapping[ProposerName, Record]
"""History of a row's drafts by each proposer."""
UNCHOSEN: Records = MappingProxyType({})
"""Records of a sequence whose proposers were not chosen yet."""
