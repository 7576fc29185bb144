"""Prompt tokens of the next step, from the speed of past steps. Pure.

A step prefills one kind of work, measured apart: a scored token costs several ordinary ones, and
embedded prompts run alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from statistics import median
from typing import Literal, Self

import attrs

from trouper.protocol.plans import Chunk, Plan, RowId, Stepped
from trouper.protocol.settings import Settings

IDLE_STEP_S = 0.5
"""A prefill step without streams: efficient, yet aborts are seen soon."""
FIRST_CHUNK_TOKENS = 16
"""Before any measurement; grows up to fourfold a step."""
# On CPU 16 tokens beside decode cost 1.4 decode steps, and fewer tokens hardly less.
MIN_BUSY_TOKENS = 16
"""While rows decode."""
# A smaller one would pay the weights' memory traffic again.
MIN_IDLE_TOKENS = 64
"""Without decoding rows."""

# Each pass reads the weights: one token a step for each of 16 prompts would take 16 passes.
MIN_LONE_TOKENS = 64
"""In a separate pass."""

# A slow step reflects the machine (a new kernel, a busy moment), not the chunk; a second in a row
# counts. Otherwise one slow step makes chunks so small that each has a new shape and is slow again.
SURPRISING = 3.0
"""Factor over a similar step from which one measurement is ignored."""
# Beside other programs' work the longest of some forty steps takes 1.4 times its target, on a quiet
# machine 1.03 times.
AIM, MAX_AIM = 0.75, 0.95
"""Target of a step as a share of --decode-stall-ms: before EVEN_STEPS steps were measured, and
most."""
EVEN_STEPS = 40
"""Steps of which one may exceed --decode-stall-ms."""
# Each pass has a fixed cost, which a remainder of a few tokens would pay again.
REST = 1.5
"""Most chunks in a step that completes all prompts while no row decodes."""
NEWEST = 0.2
LOOK_EVERY = 16
"""Steps in a row that decode and prefill, after which one decodes alone, to be measured."""
LOOKS = 3
"""Steps of whose seconds the median is a decode step's: a slow one does not count."""
OTHER_COST_TOKENS = 1024
"""Number of earlier tokens whose attention costs as much as the rest of a token's work. A larger
model has more."""
WORKS: tuple[Work, ...] = ("text", "score", "embed")


@attrs.define
class ChunkSizer:
    """Prompt tokens that one step may prefill within `target_s`."""

    # A controller, not a model: cost depends on the device, the context and the batch, and drifts.

    target_s: float
    max_tokens: int
    tokens: int = FIRST_CHUNK_TOKENS
    min_tokens: int = MIN_BUSY_TOKENS
    _measured: bool = False
    # Tokens and seconds of the last accepted step.
    _seen: tuple[int, float] = (0, 0.0)
    _end: int = 0
    """Longest context at the end of that step, in tokens."""
    _surprised: bool = False

    def __attrs_post_init__(self) -> None:
        self.tokens = min(self.tokens, self.max_tokens)
        self.min_tokens = min(self.min_tokens, self.max_tokens)

    def expect(self, tokens: int) -> None:
        """Set an estimate until the first measurement."""
        if not self._measured:
            self.tokens = max(self.min_tokens, min(self.max_tokens, tokens))

    def tokens_behind(self, context: int) -> int:
        """Tokens of a step whose longest prompt has `context` tokens so far: fewer where attention
        takes longer than in the last step."""
        # Two steps are planned before one is measured, in which a prompt may have grown threefold.
        tokens, seconds = self._seen
        if not (tokens and self._end):
            return self.tokens
        longer = (context + self.tokens + OTHER_COST_TOKENS) / (self._end + OTHER_COST_TOKENS)
        expected_s = seconds * self.tokens / tokens * longer
        if longer <= 1 or expected_s <= self.target_s:
            return self.tokens
        return max(self.min_tokens, int(self.tokens * self.target_s / expected_s))

    def measured(
        self,
        tokens: int,
        seconds: float,
        *,
        limited: bool = False,
        preparing: bool = False,
        end: int = 0,
    ) -> None:
        """Learn from a step of `tokens` prefilled tokens and `seconds`, decode included. `limited`:
        more tokens were waiting. `preparing`: kernels were prepared, and chunks can only grow.
        `end`: the longest context at the step's end."""
        says_nothing = seconds <= 0 or tokens <= 0 or (preparing and seconds > self.target_s)
        if says_nothing or self._surprising(tokens, seconds):
            return
        self._measured, self._seen, self._end = True, (tokens, seconds), end
        ratio = self.target_s / seconds
        # A remainder of a prompt, or noise, says little about the whole chunk: halve at most.
        if ratio < 1:
            self.tokens = max(
                self.min_tokens, min(self.tokens, int(max(tokens, self.tokens) * max(ratio, 0.5)))
            )
        elif limited or tokens >= self.tokens:
            self.tokens = max(
                self.tokens, min(self.max_tokens, int(tokens * min(ratio * 0.9, 4.0)))
            )

    def _surprising(self, tokens: int, seconds: float) -> bool:
        seen_tokens, seen_s = self._seen
        self._surprised = (
            not self._surprised and tokens <= 1.25 * seen_tokens and seconds > SURPRISING * seen_s
        )
        return self._surprised


def take_turns(
    remaining: Sequence[tuple[RowId, int]], budget: int, last: RowId
) -> list[tuple[RowId, int]]:
    """Choose rows for separate passes, few in number. Arguments and result as in `share_chunks`."""
    # Round robin in the order of row ids, which grow, from behind `last`, the last row of the step
    # before: each row waits for every other row once at most.
    chosen, tokens = list[tuple[RowId, int]](), 0
    for row, requested in sorted(remaining, key=lambda pair: (pair[0] <= last, pair[0])):
        if not chosen or tokens + min(requested, MIN_LONE_TOKENS) <= budget:
            chosen.append((row, requested))
            tokens += min(requested, MIN_LONE_TOKENS)
        else:
            break
    return chosen


def share_chunks(
    remaining: Sequence[tuple[RowId, int]], budget: int, max_tokens: int
) -> tuple[Chunk, ...]:
    """Split `budget` evenly; short prompts leave the rest to others. `remaining`: rows and tokens,
    oldest first."""
    # A short prompt never waits behind a long one, and a long one gets a share of each step. Longer
    # rows get equal numbers even if tokens remain: rows run as wide as the widest, so another token
    # for some would be padding for the others.
    chunks: dict[RowId, int] = {}
    left, equal = max(budget, len(remaining)), 0
    for index, (row, requested) in enumerate(sorted(remaining, key=lambda pair: pair[1])):
        share = equal or left // (len(remaining) - index)
        if requested > share:
            equal = share  # Those that follow want more, too.
        chunks[row] = min(requested, share, max_tokens)
        left -= chunks[row]
    return tuple(Chunk(row, chunks[row]) for row, _ in remaining)


def round_chunk(start: int, tokens: int, step: int) -> int:
    """Shorten a chunk behind `start` to end at a multiple of `step`, or of a smaller power of two,
    keeping half of the tokens."""
    # Lengths of attention then recur.
    unit = min(step, 1 << max(tokens.bit_length() - 2, 0))
    return (start + tokens) // unit * unit - start


def free_rows(
    admitted: int, prefilling: int, rows: int, prefill_rows: int, under_pressure: bool
) -> int:
    """Queued requests that may enter; under memory pressure one, into an empty batch."""
    if under_pressure:
        return 1 if admitted == 0 else 0
    return max(0, min(rows - admitted, prefill_rows - prefilling))


Work = Literal["text", "score", "embed"]
"""Purpose of a prefill: an answer, the prompt's own log-probabilities, an embedding."""


@attrs.define
class Sizers:
    """Chunk sizes of one kind of work; `busy` for steps that also decode."""

    busy: ChunkSizer
    idle: ChunkSizer

    @classmethod
    def of(cls, stall_s: float, max_tokens: int, min_idle: int) -> Self:
        return cls(
            ChunkSizer(stall_s, max_tokens), ChunkSizer(IDLE_STEP_S, max_tokens, min_idle, min_idle)
        )


@attrs.frozen
class PlannedWork:
    work: Work
    limited: bool
    """Whether tokens of this kind were left over."""
    end: int = 0
    """Longest context at the end."""


@attrs.define
class PrefillBudget:
    _stall_s: float
    _sizers: dict[Work, Sizers]
    # Prefill of each plan in flight, the oldest first.
    _planned: deque[PlannedWork] = attrs.field(factory=deque)
    _last: Work = "embed"
    _looks: deque[float] = attrs.field(factory=lambda: deque(maxlen=LOOKS))
    _shared_steps: int = LOOK_EVERY
    """Since the last step that decoded alone. The first one looks."""
    _overruns: deque[float] = attrs.field(factory=lambda: deque(maxlen=EVEN_STEPS))
    """Seconds of steps that decoded and prefilled as many tokens as they might, as multiples of
    their targets."""
    decode_s: float = 0.0
    """Seconds of a decode step."""
    prefill_rate: float = 0.0
    """Moving average of tokens a second; 0 before any measurement."""

    @classmethod
    def of(cls, settings: Settings, chunk_step: int = 1) -> Self:
        # A device that prepares shapes has done so for lone prompts of up to as many tokens, which
        # cost about as much as a few do.
        stall_s, max_tokens = settings.decode_stall_ms / 1000, settings.prefill_step_size
        min_idle = max(MIN_IDLE_TOKENS, chunk_step)
        sizers = {work: Sizers.of(stall_s * AIM, max_tokens, min_idle) for work in WORKS}
        return cls(stall_s, sizers)

    def turn(self, waiting: Collection[Work]) -> Work:
        """Next kind of work, round robin."""
        after = WORKS.index(self._last) + 1
        return next(work for work in (*WORKS[after:], *WORKS[:after]) if work in waiting)

    @property
    def aim(self) -> float:
        """Target of a step as a share of --decode-stall-ms: more where steps take what was
        expected."""
        if len(self._overruns) < EVEN_STEPS:
            return AIM
        return max(AIM, min(MAX_AIM, 1 / sorted(self._overruns)[-2]))

    @property
    def target_s(self) -> float:
        """Seconds that a step should take that decodes and prefills."""
        # If decoding alone comes near the stall bound (a large batch, a busy machine), prefill may
        # take as long again: with less a client would wait for minutes.
        return max(self._stall_s * self.aim, 2 * self.decode_s)

    def must_look(self) -> bool:
        """Whether the next step decodes alone, though prompts wait. Asked once for each step that
        could do both."""
        # While prompts never stop coming, nothing else says what a large batch takes: its prompts
        # got sixteen tokens a step.
        self._shared_steps = (self._shared_steps + 1) % (LOOK_EVERY + 1)
        return not self._shared_steps

    def plan(self, work: Work, *, limited: bool = False, end: int = 0) -> None:
        """Note the current step's kind of work, and the longest context at its end."""
        self._planned.append(PlannedWork(work, limited, end))
        self._last = work

    def budget(self, requested: int, *, busy: bool, work: Work = "text", context: int = 0) -> int:
        """Tokens that the next step may prefill of `requested`. `busy`: the step also decodes.
        `context`: tokens so far of the longest prompt."""
        sizers = self._sizers[work]
        if busy:
            return sizers.busy.tokens_behind(context)
        return requested if requested <= REST * sizers.idle.tokens else sizers.idle.tokens

    def answered(self, plan: Plan, stepped: Stepped) -> None:
        """Learn from a step: the target from decoding and from overruns, chunk sizes and speed
        from prefill."""
        prefilled = sum(chunk.tokens for chunk in plan.prefill)
        if plan.decode and not prefilled:
            self._looks.append(stepped.seconds)
            self.decode_s = median(self._looks)
        elif prefilled:
            planned = (
                self._planned.popleft() if self._planned else PlannedWork("text", limited=False)
            )
            sizers = self._sizers[planned.work]
            rate = prefilled / stepped.seconds if stepped.seconds > 0 else 0.0
            if planned.work == "text" and rate:
                self.prefill_rate += (
                    NEWEST * (rate - self.prefill_rate) if self.prefill_rate else rate
                )
                rate = self.prefill_rate
            if not plan.decode:
                sizers.busy.expect(int(rate * self._stall_s / 4))
            elif planned.limited and not stepped.preparing:
                self._overruns.append(stepped.seconds / sizers.busy.target_s)
            sizer = sizers.busy if plan.decode else sizers.idle
            sizer.measured(
                prefilled,
                stepped.seconds,
                limited=planned.limited,
                preparing=stepped.preparing,
                end=planned.end,
            )
        target_s = self.target_s
        for sizers in self._sizers.values():
            sizers.busy.target_s = target_s
