"""Prefill budget: the number of prompt tokens of the next step, from the speed of past steps. Pure.

A prompt token whose log-probabilities are requested costs several times what another one does,
since the model's head and a search for the most likely tokens run for each; prompts that are
embedded run alone. So each kind of work is measured separately, and a step prefills prompts of one
kind only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Literal, Self

import attrs

from trouper.protocol.plans import Chunk, Plan, RowId, Stepped
from trouper.protocol.settings import Settings

IDLE_STEP_S = 0.5
"""Length of a prefill step when no stream waits: long enough to be efficient, short enough that a
newcomer, a withdrawal or a shutdown is seen soon."""
FIRST_CHUNK_TOKENS = 16
"""Chunk size before any measurement. It grows up to fourfold a step, so a fast device is not held
back for long."""
MIN_BUSY_TOKENS = 16
"""Minimum chunk of a step that also decodes. On CPU 16 tokens beside decode cost 1.4 decode steps,
and fewer tokens hardly less: a smaller chunk only increases the number of steps."""
MIN_IDLE_TOKENS = 64
"""Minimum chunk of a step that only prefills. No stream waits for such a step, and each smaller one
would pay the weights' memory traffic again."""

MIN_LONE_TOKENS = 64
"""Minimum chunk of a row whose chunk runs in a pass of its own, where several rows could have one:
each pass reads the weights. Beside a stream 16 prompts of 500 tokens to embed got one token each a
step, in 16 passes, and took longer than ten minutes."""

SURPRISING = 3.0
"""Factor over the duration of a step with about as many prefill tokens, from which a measurement is
ignored: it reflects the machine (a device that compiles a new shape, a busy moment), not the chunk.
A second such step in a row is accepted. Without this rule one slow step made chunks so small that
each had a new shape, and was slow for that reason."""


@attrs.define
class ChunkSizer:
    """Number of prompt tokens that one step may prefill so that it ends within `target_s`.

    A controller, not a model: cost depends on the device, the context and the batch, and drifts.
    The chunk shrinks while steps are too long and grows while they are short.
    """

    target_s: float
    max_tokens: int
    tokens: int = FIRST_CHUNK_TOKENS
    min_tokens: int = MIN_BUSY_TOKENS
    _measured: bool = False
    _seen: tuple[int, float] = (0, 0.0)
    """Tokens and seconds of the last accepted step."""
    _surprised: bool = False

    def __attrs_post_init__(self) -> None:
        self.tokens, self.min_tokens = (
            min(self.tokens, self.max_tokens),
            min(self.min_tokens, self.max_tokens),
        )

    def expect(self, tokens: int) -> None:
        """Set an estimate from other steps, which holds until the first measurement."""
        if not self._measured:
            self.tokens = max(self.min_tokens, min(self.max_tokens, tokens))

    def measured(
        self, tokens: int, seconds: float, *, limited: bool = False, preparing: bool = False
    ) -> None:
        """Learn from a step that prefilled `tokens` tokens in `seconds`, decode included.
        `limited`: more would have been prefilled if it had been allowed; chunks that are rounded
        have fewer tokens than that. `preparing`: the device prepared kernels in it, which takes as
        long with a smaller chunk: such a step can only show that chunks may be larger."""
        if (
            seconds <= 0
            or tokens <= 0
            or (preparing and seconds > self.target_s)
            or self._surprising(tokens, seconds)
        ):
            return
        self._measured, self._seen = True, (tokens, seconds)
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
    """Choose the rows of the next step where each row's chunk runs in a pass of its own, so that
    `budget` tokens make few passes.

    Round robin in the order of row ids, which grow: the rows after `last`, the last row of the step
    before, come first, and a newcomer comes after those that entered before it. Each row waits for
    every other row once at most. `remaining` as in `share_chunks`; so is what is returned, with
    fewer rows.
    """
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
    """Split `budget` tokens among prefilling rows: equal shares; a short prompt leaves the rest of
    its share to the others.

    Equal parts keep a short prompt from waiting behind a long one: it gets its share of the first
    plan after it entered, whatever the others have left. However many short prompts arrive, a long
    one gets an equal share of each step, so none starves. Rows that want more than a share all get
    the same number of tokens, even if fewer tokens than such rows are left over: rows run together
    as wide as the widest, so one more token for some would be padding for the others. `remaining`:
    rows and their remaining tokens, oldest row first.
    """
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
    """Shorten a chunk of `tokens` tokens behind `start` so that it ends at a multiple of `step`, or
    of a smaller power of two, and has at least half as many tokens: the lengths that attention
    meets then recur from prompt to prompt."""
    unit = min(step, 1 << max(tokens.bit_length() - 2, 0))
    return (start + tokens) // unit * unit - start


def free_rows(
    admitted: int, prefilling: int, rows: int, prefill_rows: int, under_pressure: bool
) -> int:
    """Number of queued requests that may be admitted now. Under memory pressure only an empty batch
    takes one, to make progress."""
    if under_pressure:
        return 1 if admitted == 0 else 0
    return max(0, min(rows - admitted, prefill_rows - prefilling))


AIM = 0.75
"""Share of the stall bound (--decode-stall-ms) that is the target of a step: the longest of some
forty steps took 1.4 times its target."""
REST = 1.5
"""Maximum number of chunks that one step prefills while no row decodes, if that completes all
prompts: each pass has a fixed cost, which a remainder of a few tokens would pay again."""
NEWEST = 0.2
"""Weight of the newest step in a moving average."""


Work = Literal["text", "score", "embed"]
"""Purpose of a prefill: an answer, the prompt's own log-probabilities, an embedding."""
WORKS: tuple[Work, ...] = ("text", "score", "embed")


@attrs.define
class Sizers:
    """Chunk sizes for one kind of work. `busy`: for steps that also decode, so that streams wait
    for them."""

    busy: ChunkSizer
    idle: ChunkSizer

    @classmethod
    def of(cls, stall_s: float, max_tokens: int, min_idle: int) -> Self:
        return cls(
            ChunkSizer(stall_s, max_tokens), ChunkSizer(IDLE_STEP_S, max_tokens, min_idle, min_idle)
        )


@attrs.frozen
class PlannedWork:
    """What a plan in flight prefills."""

    work: Work
    limited: bool
    """Whether prompts of this kind have tokens left that the budget did not allow."""


@attrs.define
class PrefillBudget:
    """Number of tokens that the next step may prefill."""

    _stall_s: float
    _sizers: dict[Work, Sizers]
    _planned: deque[PlannedWork] = attrs.field(factory=deque)
    """What each plan in flight prefills, the oldest first."""
    _last: Work = "embed"
    decode_s: float = 0.0
    """Moving average of the seconds of a step that only decodes."""
    prefill_rate: float = 0.0
    """Moving average of prefilled tokens a second; 0 before any measurement."""

    @classmethod
    def of(cls, settings: Settings, chunk_step: int = 1) -> Self:
        """`chunk_step`: see `ModelCard`. A device that prepares shapes has done so for lone prompts
        of up to as many tokens, which cost it about as much as a few do."""
        stall_s, max_tokens = settings.decode_stall_ms / 1000 * AIM, settings.prefill_step_size
        min_idle = max(MIN_IDLE_TOKENS, chunk_step)
        return cls(stall_s, {work: Sizers.of(stall_s, max_tokens, min_idle) for work in WORKS})

    def turn(self, waiting: Collection[Work]) -> Work:
        """Kind of work that the next step prefills: round robin over the waiting kinds."""
        after = WORKS.index(self._last) + 1
        return next(work for work in (*WORKS[after:], *WORKS[:after]) if work in waiting)

    def plan(self, work: Work, *, limited: bool = False) -> None:
        """Note the kind of work of the step being composed; its duration is attributed to that
        kind. `limited`: see `PlannedWork`."""
        self._planned.append(PlannedWork(work, limited))
        self._last = work

    def budget(self, requested: int, *, busy: bool, work: Work = "text") -> int:
        """Number of tokens that the next step may prefill. `requested`: the remaining tokens of all
        prompts of this kind. `busy`: the step also decodes."""
        sizers = self._sizers[work]
        if busy:
            return sizers.busy.tokens
        return requested if requested <= REST * sizers.idle.tokens else sizers.idle.tokens

    def answered(self, plan: Plan, stepped: Stepped) -> None:
        """Learn from the result of a plan. Where decoding alone comes near the stall bound (a large
        batch, a busy machine), prefill may take as long again: with less it would hardly progress,
        and its client would wait for minutes."""
        prefilled = sum(chunk.tokens for chunk in plan.prefill)
        if plan.decode and not prefilled:
            self.decode_s += NEWEST * (stepped.seconds - self.decode_s)
            for sizers in self._sizers.values():
                sizers.busy.target_s = max(self._stall_s, 2 * self.decode_s)
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
                sizers.busy.expect(int(rate * self._stall_s / 3))
            sizer = sizers.busy if plan.decode else sizers.idle
            sizer.measured(
                prefilled, stepped.seconds, limited=planned.limited, preparing=stepped.preparing
            )
