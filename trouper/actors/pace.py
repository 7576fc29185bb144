"""How fast steps have been, and how much of the prompts the next one may prefill for it. Pure."""

from __future__ import annotations

from typing import Self

import attrs

from trouper.actors.policy import IDLE_STEP_S, LEAST_IDLE_TOKENS, ChunkSizer
from trouper.protocol.plans import Plan, Stepped
from trouper.protocol.settings import Settings

AIM = 0.75
"""Part of the stall bound that a step aims at: the longest of some forty steps took 1.4 times what was aimed at."""
REST = 1.5
"""While nobody decodes, what is left of all prompts is prefilled at once if it is not more than so many chunks: a pass has
a price of its own, and the rest of a prompt would pay it again for a few tokens."""
NEWEST = 0.2
"""What the newest step counts in an average."""


@attrs.define
class Pace:
    """`busy`: a step also decodes, so somebody waits for it."""

    _stall_s: float
    _busy: ChunkSizer
    _idle: ChunkSizer
    decode_s: float = 0.0
    """Of a step that only decodes, about."""
    prefill_rate: float = 0.0
    """Tokens a second, about; 0 before any was measured."""

    @classmethod
    def of(cls, settings: Settings) -> Self:
        stall_s, most = settings.decode_stall_ms / 1000 * AIM, settings.prefill_step_size
        idle = ChunkSizer(IDLE_STEP_S, most, LEAST_IDLE_TOKENS, LEAST_IDLE_TOKENS)
        return cls(stall_s, ChunkSizer(stall_s, most), idle)

    def budget(self, wanted: int, *, busy: bool) -> int:
        """How many tokens the next step may prefill, of so many that are left of all prompts."""
        if busy:
            return self._busy.tokens
        return wanted if wanted <= REST * self._idle.tokens else self._idle.tokens

    def answered(self, plan: Plan, stepped: Stepped) -> None:
        """Where decoding alone comes near the stall bound (a large batch, a busy machine), prefill may take as long
        again: with less it would hardly move, and its client would wait for minutes."""
        prefilled = sum(chunk.tokens for chunk in plan.prefill)
        if plan.decode and not prefilled:
            self.decode_s += NEWEST * (stepped.seconds - self.decode_s)
            self._busy.target_s = max(self._stall_s, 2 * self.decode_s)
        elif prefilled:
            if stepped.seconds > 0:
                rate = prefilled / stepped.seconds
                self.prefill_rate += NEWEST * (rate - self.prefill_rate) if self.prefill_rate else rate
            if not plan.decode:
                self._busy.expect(int(self.prefill_rate * self._stall_s / 3))
            (self._busy if plan.decode else self._idle).measured(prefilled, stepped.seconds)
