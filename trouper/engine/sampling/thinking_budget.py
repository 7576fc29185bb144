"""Thinking budget: after the limit a row must write the end-of-thinking marker, and then
answers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from trouper.engine.grammars.token_masks import Mask, mask_bytes
from trouper.protocol.plans import ThinkingLimit


class ThinkingRule:
    """Follows one row's thinking, and masks the next token as a grammar does."""

    fault = ""
    """Always empty: a thinking budget cannot fail."""

    def __init__(
        self, limit: ThinkingLimit, vocabulary: int, min_tokens: int = 0, ends: Sequence[int] = ()
    ) -> None:
        """No token of `ends` is allowed before `min_tokens` tokens, except in the forced marker."""
        self._limit, self._min_tokens = limit, min_tokens
        self._size = mask_bytes(vocabulary)
        self._free = np.full(self._size, 255, np.uint8)
        self._early = self._free.copy()
        for token in ends:
            self._early[token // 8] &= 255 - (1 << token % 8)
        self._thinks = limit.begun
        self._over = False
        self._used = 0
        self._recent: tuple[int, ...] = ()

    def accept(self, token: int) -> str:
        """Add the next token. Always returns "", since no error is possible."""
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
        """Number of draft tokens worth verifying: all."""
        return len(draft)

    def along(self, draft: Sequence[int], drawn: int) -> list[Mask]:
        """Masks before each draft token, and after the last."""
        lookahead = copy(self)
        masks = [lookahead.allowed(drawn)]
        for index, token in enumerate(draft, 1):
            lookahead.accept(token)
            masks.append(lookahead.allowed(drawn + index))
        return masks

    def allowed(self, drawn: int) -> Mask:
        """Mask after `drawn` tokens of the answer. Thinking has a count of its own, since thinking
        may begin anywhere."""
        if self._over or not self._thinks or self._used < self._limit.tokens:
            return self._early if drawn < self._min_tokens else self._free
        forced = self._limit.end[self._written()]
        mask = np.zeros(self._size, np.uint8)
        mask[forced // 8] = 1 << (forced % 8)
        return mask

    def _written(self) -> int:
        """Number of the marker's tokens at the end of the text."""
        end = self._limit.end
        return next((n for n in range(len(end) - 1, 0, -1) if self._recent[-n:] == end[:n]), 0)
