"""A bound on how long a row thinks: then it writes its own end of thinking, and goes on to answer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from trouper.engine.grammars.grammar_compiler import Mask, mask_bytes
from trouper.protocol.plans import ThinkingLimit


class ThinkingRule:
    """One row's thinking, followed token by token. Says what may come next, as a grammar does."""

    fault = ""
    """Nothing can go wrong."""

    def __init__(self, limit: ThinkingLimit, vocabulary: int) -> None:
        self._limit = limit
        self._size = mask_bytes(vocabulary)
        self._thinks = limit.begun
        self._over = False
        self._used = 0
        self._recent: tuple[int, ...] = ()

    def took(self, token: int) -> str:
        """The row's next token."""
        if self._over:
            return ""
        start, end = self._limit.start, self._limit.end
        self._recent = (*self._recent, token)[-max(len(start), len(end)) :]
        if self._thinks:
            self._used += 1
            self._over = self._recent[-len(end) :] == end
        else:
            self._thinks = self._recent[-len(start) :] == start
        return ""

    def fitting(self, draft: Sequence[int]) -> int:
        """How many of these tokens are worth a try: what is forced is known when their masks are made."""
        return len(draft)

    def along(self, draft: Sequence[int], drawn: int) -> list[Mask]:
        """What is allowed before each of these tokens, and after the last."""
        scout = copy(self)
        masks = [scout.allowed(drawn)]
        for token in draft:
            scout.took(token)
            masks.append(scout.allowed(drawn))
        return masks

    def allowed(self, drawn: int) -> Mask:  # noqa: ARG002  It counts for itself: thinking may begin anywhere.
        """Everything, or the next token of the end of thinking."""
        if self._over or not self._thinks or self._used < self._limit.tokens:
            return np.full(self._size, 255, np.uint8)
        forced = self._limit.end[self._written()]
        mask = np.zeros(self._size, np.uint8)
        mask[forced // 8] = 1 << (forced % 8)
        return mask

    def _written(self) -> int:
        """How much of the end was written already."""
        end = self._limit.end
        return next((n for n in range(len(end) - 1, 0, -1) if self._recent[-n:] == end[:n]), 0)
