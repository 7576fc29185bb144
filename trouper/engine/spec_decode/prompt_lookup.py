"""What a row may say next, guessed from what it has said: prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding).

Drafts follow from the row's tokens alone, so every rank drafts the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs


class Proposer(Protocol):
    """Guesses one row's next tokens. A draft model, or a head that the model brings, could be another."""

    @property
    def matched(self) -> int:
        """How sure it may be: of the row's last tokens so many were foretold, or stand before what it would draft. 0: it
        has nothing to draft."""

    def took(self, tokens: Sequence[int]) -> None:
        """The row's next tokens. Cheap: it happens in each step."""

    def draft(self, max_tokens: int) -> list[int]:
        """Up to so many tokens that may come next."""


@attrs.frozen
class Drafting:
    """How rows draft: matches of `least` to `most` tokens are looked up. At most `tokens` are drafted at a time."""

    min_ngram: int = 3
    max_ngram: int = 8
    tokens: int = 16

    @property
    def slack(self) -> int:
        """What rings hold beyond their window. A step's drafts, right or wrong, are written over the oldest tokens; and a
        snapshot may be wanted of where a row was two such steps ago: when its answer ended, and another one was planned."""
        return 3 * (self.tokens + 1)

    def proposer(self, prompt: Sequence[int]) -> Proposer:
        return NgramProposer(prompt, self.min_ngram, self.max_ngram)


DRAFTING = Drafting()


NOWHERE = -1
SUBSTITUTED, RESUMED = 8, 6
"""A match of so many tokens is followed beyond one that differs, and then counts as this long: numbers in lists, a word that
was changed. 280 tokens of numbered lists took 62 steps instead of 118."""
CANDIDATES = 8
"""Places of one n-gram that are looked at."""


class NgramProposer:
    """Finds where the row's newest tokens stood before, and goes on as that place did: the longest match first, of those
    the newest. A match that goes on holding is followed, so that it grows beyond the longest n-gram, and a long one also
    beyond a token that differs; one that reaches the row's end repeats itself.

    An index of n-grams of the least length, with a chain through the places of each, as LZ77's (zlib): one entry a token,
    and a few of the newest places are looked at. Nothing is hashed but by Python's own dict, so no n-gram is taken for
    another.
    """

    def __init__(self, prompt: Sequence[int], min_ngram: int, max_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._tokens = list(prompt)
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._newest: dict[tuple[int, ...], int] = {}
        """Of each n-gram the last place that it stands before."""
        self._before = [NOWHERE] * min_ngram
        """Of each place the one before it that the same n-gram stands before. Those below its length are entered."""
        self._next, self._length = 0, 0
        """What is followed: the place of the token that is foretold, and how many before it matched."""
        self._followed = len(self._tokens)
        """Tokens that were compared with what was foretold."""
        self._looked_up_at = 0
        """Tokens when a match was last looked for."""

    @property
    def matched(self) -> int:
        self._catch_up()
        return self._length

    def took(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def draft(self, max_tokens: int) -> list[int]:
        """Not more than have matched: what repeats three tokens seldom repeats eight more."""
        self._catch_up()
        max_tokens = min(max_tokens, self._length)
        draft = self._tokens[self._next : self._next + max_tokens]
        while len(draft) < max_tokens:
            draft += draft[: max_tokens - len(draft)]
        return draft

    def _catch_up(self) -> None:
        if self._looked_up_at == len(self._tokens):
            return
        self._follow()
        self._enter()
        if self._length < self._max_ngram:
            self._look_up()
        self._looked_up_at = len(self._tokens)

    def _follow(self) -> None:
        for token in self._tokens[self._followed :] if self._length else ():
            if self._tokens[self._next] == token:
                self._length += 1
            elif self._length >= SUBSTITUTED:
                self._length = RESUMED
            else:
                self._length = 0
                break
            self._next += 1
        self._followed = len(self._tokens)

    def _enter(self) -> None:
        """N-grams that something follows: the newest tokens never find themselves."""
        tokens, before, newest, min_ngram = self._tokens, self._before, self._newest, self._min_ngram
        first, end = len(before), len(tokens)
        if end <= first:
            return
        runs = (tokens[first - min_ngram + position : end - min_ngram + position] for position in range(min_ngram))
        for position, ngram in zip(range(first, end), zip(*runs, strict=True), strict=False):
            before.append(newest.get(ngram, NOWHERE))
            newest[ngram] = position

    def _look_up(self) -> None:
        """A longer match than the one that is followed, if there is one."""
        position = self._newest.get(tuple(self._tokens[-self._min_ngram :]), NOWHERE)
        for _ in range(CANDIDATES):
            if position == NOWHERE or self._length >= self._max_ngram:
                return
            length = self._match(position)
            if length > self._length:
                self._next, self._length = position, length
            position = self._before[position]

    def _match(self, position: int) -> int:
        """How many tokens before `place` are the newest ones."""
        tokens, end = self._tokens, len(self._tokens)
        longest = min(self._max_ngram, position)
        return next(
            (n for n in range(self._min_ngram, longest) if tokens[position - n - 1] != tokens[end - n - 1]), longest
        )
