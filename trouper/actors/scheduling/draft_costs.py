"""What steps with drafts take, in plain steps: measured, since it depends on the device, on how many rows are in the step
and on how much they draft. Pure.

What was not measured yet is tried, small sizes before large ones, since an estimate that forbids is never put right. An
estimate that forbids fades, so that what one slow step has said is not for ever. And nothing is compared with a plain step
of another time or of other rows: on a machine that does something else now and then, such a comparison is worth nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import attrs

REFRESH = (8, 48)
"""Steps with drafts, after which a plain one is measured again: few where drafts promise little, since there an old
measurement does the most harm and a plain step costs the least."""
OLD = 192
"""Steps, after which a plain one is measured again in any case."""
AGREE = 1.25
"""Plain steps that differ by more are not of the same time: the machine does something else meanwhile."""
NEVER = 0.9
"""Of a plain step: no step with drafts takes so little. If one seems to, the plain one was measured in a busy moment."""
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
class Plain:
    """The last plain steps of so many rows."""

    seconds: deque[float] = attrs.field(factory=lambda: deque(maxlen=3))
    middle: float = 0.0
    at: int = 0
    """Step of the last one."""
    new: bool = True

    def add(self, seconds: float, step: int) -> bool:
        """Whether it took as long as those before. The first says little: a device compiles for it, buffers grow."""
        self.at = step
        if self.new:
            self.new = False
            return True
        self.seconds.append(seconds)
        self.middle = median(self.seconds) if len(self.seconds) == self.seconds.maxlen else min(self.seconds)
        return self.middle / AGREE <= seconds <= self.middle * AGREE


@attrs.define(eq=False)
class Ratios:
    """What the last steps with drafts took, in plain steps."""

    values: deque[float] = attrs.field(factory=lambda: deque(maxlen=SAMPLES))
    middle: float = 0.0
    at: int = 0
    """Step of the last one."""
    new: bool = True
    unproved: int = 0
    """So many came since the last plain step: what they were compared to may have been over."""

    def add(self, value: float, step: int) -> None:
        if not self.new:
            self.values.append(value)
            self.unproved += 1
            self._count()
        self.new, self.at = False, step

    def forget(self) -> None:
        """Those that are not proved."""
        for _ in range(min(self.unproved, len(self.values))):
            self.values.pop()
        self.unproved = 0
        self._count()

    def _count(self) -> None:
        few = len(self.values) < SURE
        self.middle = (min if few else median)(self.values) if self.values else 0.0


class Costs:
    """What steps with drafts take, by how many rows decode and how much they draft, against plain ones of as many rows and
    of the same time."""

    def __init__(self) -> None:
        self._plain: dict[Rows, Plain] = {}
        self._ratios: dict[tuple[Rows, Size], Ratios] = {}
        self._steps = 0
        self._since_plain = 0
        """Steps with drafts since the last plain one."""
        self._doubted = 0
        """Plain steps that are wanted at once."""

    def measured(self, rows: int, size: Size | None, seconds: float) -> None:
        """One step. `size` None: nobody was asked."""
        self._steps += 1
        if size is None:
            self._measured_plain(self._plain.setdefault(rows, Plain()), seconds)
            return
        self._since_plain += 1
        plain = self._plain.get(rows)
        if plain is None or not plain.middle:
            return
        if seconds < NEVER * plain.middle:
            self._doubted = max(self._doubted, 1)
        else:
            self._ratios.setdefault((bucket_of(rows), size), Ratios()).add(seconds / plain.middle, self._steps)

    def _measured_plain(self, plain: Plain, seconds: float) -> None:
        """One that does not agree is followed by others, until it is known which were wrong."""
        drafted, self._since_plain = self._since_plain, 0
        agrees = plain.add(seconds, self._steps)
        self._doubted = max(0, self._doubted - 1) if agrees or not drafted else 2
        for ratios in self._ratios.values() if drafted else ():
            if not agrees:
                ratios.forget()
            ratios.unproved = 0

    def comparable(self, rows: int, promised: float) -> bool:
        """Whether a plain step of so many rows was measured not long ago. `promised`: what drafts bring."""
        plain = self._plain.get(rows)
        if plain is None or not plain.middle or self._doubted:
            return False
        least, most = REFRESH
        enough = min(max(least, most * (promised - 1)), most)
        return self._since_plain < enough and self._steps - plain.at < OLD

    def affordable(self, rows: int, sizes: Sequence[int]) -> list[int]:
        """Those that are no leap beyond what was measured with so many rows: a try should not cost dozens of steps."""
        bucket = bucket_of(rows)
        tried = max(
            (size for (some, size), ratios in self._ratios.items() if some == bucket and ratios.middle), default=1
        )
        return [size for size in sizes if size <= LEAP * max(tried, 1)]

    def ratio(self, rows: int, size: Size) -> float:
        """In plain steps. Of what was not measured, the least that it can be: fewer rows and shorter drafts take no more."""
        bucket = bucket_of(rows)
        own = self._ratios.get((bucket, size))
        if own is not None and own.middle:
            return self._faded(own)
        guesses = [1 + PRIOR * size]
        for (some, other), ratios in self._ratios.items():
            if not ratios.middle:
                continue
            if some <= bucket and other <= size:
                guesses.append(self._faded(ratios))
            elif some == bucket:
                guesses.append(1 + (self._faded(ratios) - 1) * size / other)
        return max(guesses)

    def _faded(self, ratios: Ratios) -> float:
        age = self._steps - ratios.at
        kept: float = 0.5 ** (age / FADES)
        return 1 + (ratios.middle - 1) * kept


def bucket_of(rows: int) -> Rows:
    """Up to four rows by their number, more by powers of two."""
    return rows if rows <= 4 else 1 << (rows - 1).bit_length()


def size_of(drafted: int) -> Size:
    return 1 << (drafted - 1).bit_length() if drafted else 0
