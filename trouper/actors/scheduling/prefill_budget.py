"""Prefill budget: the number of prompt tokens of the next step, from the speed of past steps. Pure.

A prompt token whose log-probabilities are requested costs several times what another one does,
since the model's head and a search for the most likely tokens run for each; prompts that are
embedded run alone. So each kind of work is measured separately, and a step prefills prompts of one
kind only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Literal, Self

import attrs

from trouper.actors.scheduling.chunk_sizer import IDLE_STEP_S, MIN_IDLE_TOKENS, ChunkSizer
from trouper.protocol.plans import Plan, Stepped
from trouper.protocol.settings import Settings

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
