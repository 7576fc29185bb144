"""Cost of steps with drafts, as a multiple of a plain step. It is measured, since it depends on the
device, on the number of rows in the step and on how much they draft. Pure.

Sizes without a measurement are tried, small ones first, since an estimate that forbids a size would
never be corrected. An estimate above a plain step decays, so that one slow step has no lasting
effect. Steps are compared only with plain steps of about the same time and of as many rows: on a
machine with other load any other comparison is worthless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import attrs

from trouper.protocol.plans import ProposerName

REFRESH = 48
"""Number of steps with drafts after which a plain step is measured again, where drafts double the
rate; in proportion where they promise less, down to a sixth: there an old measurement does the most
harm and a plain step costs the least."""
MAX_AGE = 4 * REFRESH
"""Number of steps after which a measurement is too old to be compared with another, and half of
what a row's drafts showed is forgotten."""
AGREE = 1.25
"""Maximum ratio of two plain steps that agree. Beyond it the load of the machine has changed."""
MIN_RATIO = 0.9
"""Minimum credible cost of a step with drafts, in plain steps. Below it the plain step was measured
in a busy moment."""
GROWTH_LIMIT = 4
"""Growth limit: the next size to try is at most this multiple of a measured size, since a trial
should not cost dozens of steps. Doubling would take a copied text twice as many steps to its best
size."""
HALF_LIFE = 2000
"""Half-life, in steps, of a measured cost above that of a plain step, so that one slow moment
forbids nothing for ever."""
SAMPLES = 9
"""Number of samples of which the median counts. Of fewer than half the fastest counts: a busy
moment must not forbid what was hardly tried."""
Rows = int
Size = int
"""Maximum number of tokens that a row of the step drafted, rounded up to a power of two; 0: drafts
were allowed, and no row drafted."""


@attrs.define(eq=False)
class Plain:
    """Durations of the last plain steps with a given number of rows."""

    seconds: deque[float] = attrs.field(factory=lambda: deque(maxlen=3))
    middle: float = 0.0
    at: int = 0
    """Step of the last one."""
    new: bool = True

    def add(self, seconds: float, step: int) -> bool:
        """Add a step. Returns whether it agrees with those before. The first step is ignored: the
        device compiles for it, and buffers grow."""
        self.at = step
        if self.new:
            self.new = False
            return True
        self.seconds.append(seconds)
        self.middle = (
            median(self.seconds) if len(self.seconds) == self.seconds.maxlen else min(self.seconds)
        )
        return self.middle / AGREE <= seconds <= self.middle * AGREE


@attrs.define(eq=False)
class Ratios:
    """Costs of the last steps with drafts, in plain steps."""

    values: deque[float] = attrs.field(factory=lambda: deque(maxlen=SAMPLES))
    middle: float = 0.0
    at: int = 0
    """Step of the last one."""
    new: bool = True
    unproved: int = 0
    """Number of values since the last plain step. They may have been compared with an outdated
    plain step."""

    def add(self, value: float, step: int) -> None:
        """Add a measurement. What was measured long before says nothing about it."""
        if step - self.at > MAX_AGE:
            self.values.clear()
        if not self.new:
            self.values.append(value)
            self.unproved += 1
            self._count()
        self.new, self.at = False, step

    def forget(self) -> None:
        """Remove the unproved values."""
        for _ in range(min(self.unproved, len(self.values))):
            self.values.pop()
        self.unproved = 0
        self._count()

    def _count(self) -> None:
        few = 2 * len(self.values) < SAMPLES
        self.middle = (min if few else median)(self.values) if self.values else 0.0


class Costs:
    """Costs of steps with drafts, by the number of decoding rows and the size of the drafts,
    relative to plain steps of as many rows and about the same time."""

    def __init__(self) -> None:
        self._plain: dict[Rows, Plain] = {}
        self._ratios: dict[tuple[Rows, Size], Ratios] = {}
        self._passes: dict[tuple[ProposerName, Rows], Ratios] = {}
        """Cost of one pass of a proposer over these rows."""
        self._steps = 0
        self._since_plain = 0
        """Steps with drafts since the last plain one."""
        self._stale = 0
        """Number of plain steps to measure at once, because the last measurement is stale."""

    def measured(self, rows: int, size: Size | None, seconds: float) -> None:
        """Learn from one step. `size` None: a plain step, in which no row was allowed to draft."""
        self._steps += 1
        if size is None:
            self._measured_plain(self._plain.setdefault(rows, Plain()), seconds)
            return
        self._since_plain += 1
        plain = self._plain.get(rows)
        if plain is None or not plain.middle:
            return
        if seconds < MIN_RATIO * plain.middle:
            self._stale = max(self._stale, 1)
        else:
            self._ratios.setdefault((bucket_of(rows), size), Ratios()).add(
                seconds / plain.middle, self._steps
            )

    def measured_passes(self, name: ProposerName, rows: int, seconds: float) -> None:
        """Learn what a pass of the draft model or the head took in the step that was measured
        last."""
        plain = self._plain.get(rows)
        if plain is not None and plain.middle:
            self._passes.setdefault((name, bucket_of(rows)), Ratios()).add(
                seconds / plain.middle, self._steps
            )

    def draft_pass(self, name: ProposerName, rows: int) -> float:
        """Cost of a pass of the draft model or the head in plain steps. Without a measurement it is
        a lower bound, as in `ratio`."""
        bucket = bucket_of(rows)
        own = self._passes.get((name, bucket))
        if own is not None and own.middle:
            return self._kept(own) * own.middle
        known = [
            self._kept(ratios) * ratios.middle
            for (other, some), ratios in self._passes.items()
            if other == name and some <= bucket
        ]
        return max(known, default=0.0)

    def _measured_plain(self, plain: Plain, seconds: float) -> None:
        """Learn from a plain step. If it disagrees with those before, more plain steps follow,
        until it is clear which were wrong."""
        drafted, self._since_plain = self._since_plain, 0
        agrees = plain.add(seconds, self._steps)
        self._stale = max(0, self._stale - 1) if agrees or not drafted else 2
        for ratios in (*self._ratios.values(), *self._passes.values()) if drafted else ():
            if not agrees:
                ratios.forget()
            ratios.unproved = 0

    def comparable(self, rows: int, promised: float) -> bool:
        """Whether a plain step of `rows` rows was measured recently. `promised`: the expected
        speed-up of drafts."""
        plain = self._plain.get(rows)
        if plain is None or not plain.middle or self._stale:
            return False
        enough = REFRESH * min(max(1 / 6, promised - 1), 1)
        return self._since_plain < enough and self._steps - plain.at < MAX_AGE

    def affordable(self, rows: int, sizes: Sequence[int]) -> list[int]:
        """Sizes within the growth limit of those that were measured with `rows` rows."""
        bucket = bucket_of(rows)
        tried = max(
            (
                size
                for (some, size), ratios in self._ratios.items()
                if some == bucket and ratios.middle
            ),
            default=1,
        )
        return [size for size in sizes if size <= GROWTH_LIMIT * max(tried, 1)]

    def ratio(self, rows: int, size: Size) -> float:
        """Cost of a step in plain steps. Without a measurement it is a lower bound: steps with
        fewer rows or shorter drafts take no longer."""
        bucket = bucket_of(rows)
        own = self._ratios.get((bucket, size))
        if own is not None and own.middle:
            return self._decayed(own)
        guesses = [1.0]
        for (some, other), ratios in self._ratios.items():
            if not ratios.middle:
                continue
            if some <= bucket and other <= size:
                guesses.append(self._decayed(ratios))
            elif some == bucket:
                guesses.append(1 + (self._decayed(ratios) - 1) * size / other)
        return max(guesses)

    def _decayed(self, ratios: Ratios) -> float:
        return 1 + (ratios.middle - 1) * self._kept(ratios)

    def _kept(self, ratios: Ratios) -> float:
        """The part of a measurement that is believed, given its age."""
        kept: float = 0.5 ** ((self._steps - ratios.at) / HALF_LIFE)
        return kept


def bucket_of(rows: int) -> Rows:
    """Bucket of a number of rows: exact up to four, then powers of two."""
    return rows if rows <= 4 else 1 << (rows - 1).bit_length()


def size_of(drafted: int) -> Size:
    return 1 << (drafted - 1).bit_length() if drafted else 0
