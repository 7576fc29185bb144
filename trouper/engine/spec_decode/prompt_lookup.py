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

    def draft(self, most: int) -> list[int]:
        """Up to so many tokens that may come next."""


@attrs.frozen
class Drafting:
    """How rows draft: matches of `least` to `most` tokens are looked up. At most `tokens` are drafted at a time."""

    least: int = 3
    most: int = 8
    tokens: int = 16

    @property
    def slack(self) -> int:
        """What rings hold beyond their window. A step's drafts, right or wrong, are written over the oldest tokens; and a
        snapshot may be wanted of where a row was two such steps ago: when its answer ended, and another one was planned."""
        return 3 * (self.tokens + 1)

    def proposer(self, prompt: Sequence[int]) -> Proposer:
        return NgramProposer(prompt, self.least, self.most)


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

    def __init__(self, prompt: Sequence[int], least: int, most: int) -> None:
        assert 1 <= least <= most
        self._tokens = list(prompt)
        self._least, self._most = least, most
        self._newest: dict[tuple[int, ...], int] = {}
        """Of each n-gram the last place that it stands before."""
        self._before = [NOWHERE] * least
        """Of each place the one before it that the same n-gram stands before. Those below its length are entered."""
        self._next, self._length = 0, 0
        """What is followed: the place of the token that is foretold, and how many before it matched."""
        self._followed = len(self._tokens)
        """Tokens that were compared with what was foretold."""
        self._looked = 0
        """Tokens when a match was last looked for."""

    @property
    def matched(self) -> int:
        self._catch_up()
        return self._length

    def took(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def draft(self, most: int) -> list[int]:
        """Not more than have matched: what repeats three tokens seldom repeats eight more."""
        self._catch_up()
        most = min(most, self._length)
        rest = self._tokens[self._next : self._next + most]
        while len(rest) < most:
            rest += rest[: most - len(rest)]
        return rest

    def _catch_up(self) -> None:
        if self._looked == len(self._tokens):
            return
        self._follow()
        self._enter()
        if self._length < self._most:
            self._look_up()
        self._looked = len(self._tokens)

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
        tokens, before, newest, least = self._tokens, self._before, self._newest, self._least
        first, end = len(before), len(tokens)
        if end <= first:
            return
        runs = (tokens[first - least + place : end - least + place] for place in range(least))
        for place, ngram in zip(range(first, end), zip(*runs, strict=True), strict=False):
            before.append(newest.get(ngram, NOWHERE))
            newest[ngram] = place

    def _look_up(self) -> None:
        """A longer match than the one that is followed, if there is one."""
        place = self._newest.get(tuple(self._tokens[-self._least :]), NOWHERE)
        for _ in range(CANDIDATES):
            if place == NOWHERE or self._length >= self._most:
                return
            length = self._match(place)
            if length > self._length:
                self._next, self._length = place, length
            place = self._before[place]

    def _match(self, place: int) -> int:
        """How many tokens before `place` are the newest ones."""
        tokens, end = self._tokens, len(self._tokens)
        most = min(self._most, place)
        return next((n for n in range(self._least, most) if tokens[place - n - 1] != tokens[end - n - 1]), most)
