"""Prompt lookup: drafts of a row's next tokens from its earlier ones
(https://github.com/apoorvumang/prompt-lookup-decoding), which are the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import attrs

from trouper.engine.kv.ring_slots import ring_slack
from trouper.protocol.plans import RowId


class RowProposer(Protocol):
    @property
    def matched(self) -> int:
        """Number of the row's last tokens that were predicted, or that precede the draft. 0: no
        draft."""

    def append(self, tokens: Sequence[int]) -> None:
        """Add the row's next tokens. Must be cheap."""

    def draft(self, max_tokens: int) -> list[int]:
        """Propose up to `max_tokens` tokens."""


@attrs.frozen
class Drafting:
    """Settings of prompt lookup: matches of `min_ngram` to `max_ngram` tokens, and drafts of at
    most `tokens`."""

    min_ngram: int = 3
    max_ngram: int = 8
    tokens: int = 16

    @property
    def slack(self) -> int:
        """Number of tokens that rings hold beyond their window."""
        return ring_slack(self.tokens)

    def proposer(self, prompt: Sequence[int]) -> RowProposer:
        return NgramProposer(prompt, self.min_ngram, self.max_ngram)


DRAFTING = Drafting()


NOWHERE = -1
SUBSTITUTED, RESUMED = 8, 6
"""A match of SUBSTITUTED tokens goes on beyond one other token, with length RESUMED: numbers in
lists, a changed word."""
CANDIDATES = 8
"""Maximum number of occurrences of an n-gram that are compared."""
INDEXED_AT_ONCE = 4096
"""Maximum number of tokens that one call indexes, in 4 ms."""


class NgramProposer:
    """Drafts the tokens behind an earlier occurrence of the row's newest tokens: the longest match,
    of equally long ones the newest. A match is followed while it holds."""

    # The index has a chain of the occurrences of each n-gram of the minimum length, as LZ77 (zlib).

    def __init__(self, prompt: Sequence[int], min_ngram: int, max_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._tokens = list(prompt)
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._newest: dict[tuple[int, ...], int] = {}
        """For each n-gram the position after its last occurrence."""
        self._before = [NOWHERE] * min_ngram
        """For each indexed position the previous position after the same n-gram."""
        self._next, self._length = 0, 0
        """The followed match: position of the predicted token, and number of matching tokens."""
        self._followed = len(self._tokens)
        """Number of tokens that were compared with their prediction."""
        self._searched_at = 0
        """Number of tokens at the last search."""

    @property
    def matched(self) -> int:
        self._catch_up()
        return self._length

    def append(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def draft(self, max_tokens: int) -> list[int]:
        """Propose at most as many tokens as have matched."""
        self._catch_up()
        max_tokens = min(max_tokens, self._length)
        draft = self._tokens[self._next : self._next + max_tokens]
        while len(draft) < max_tokens:
            draft += draft[: max_tokens - len(draft)]
        return draft

    def _catch_up(self) -> None:
        if self._searched_at == len(self._tokens):
            return
        self._follow()
        self._enter()
        if self._length < self._max_ngram:
            self._look_up()
        self._searched_at = len(self._tokens)

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
        """Index n-grams that a token follows: the newest tokens never match themselves."""
        tokens = self._tokens
        before = self._before
        newest = self._newest
        min_ngram = self._min_ngram
        first, end = len(before), min(len(tokens), len(before) + INDEXED_AT_ONCE)
        if end <= first:
            return
        runs = (
            tokens[first - min_ngram + position : end - min_ngram + position]
            for position in range(min_ngram)
        )
        for position, ngram in zip(range(first, end), zip(*runs, strict=True), strict=False):
            before.append(newest.get(ngram, NOWHERE))
            newest[ngram] = position

    def _look_up(self) -> None:
        position = self._newest.get(tuple(self._tokens[-self._min_ngram :]), NOWHERE)
        for _ in range(CANDIDATES):
            if position == NOWHERE or self._length >= self._max_ngram:
                return
            length = self._match(position)
            if length > self._length:
                self._next, self._length = position, length
            position = self._before[position]

    def _match(self, position: int) -> int:
        """Count the tokens before `position` that equal the newest tokens."""
        tokens, end = self._tokens, len(self._tokens)
        longest = min(self._max_ngram, position)
        return next(
            (
                n
                for n in range(self._min_ngram, longest)
                if tokens[position - n - 1] != tokens[end - n - 1]
            ),
            longest,
        )


class NgramRows:
    """`Proposer` for rows that draft from their own text."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._proposers: dict[RowId, RowProposer] = {}

    # N-grams need no KV.
    def open(self, row: RowId, prompt: Sequence[int], restored: int = 0) -> None:  # noqa: ARG002
        self._proposers[row] = self._drafting.proposer(prompt)

    def drop(self, rows: Iterable[RowId]) -> None:
        for row in rows:
            self._proposers.pop(row, None)

    def append(self, tokens: Mapping[RowId, Sequence[int]]) -> None:
        for row, more in tokens.items():
            if row in self._proposers:
                self._proposers[row].append(more)

    def drafts(self, requests: Mapping[RowId, int]) -> dict[RowId, list[int]]:
        return {
            row: draft
            for row, max_tokens in requests.items()
            if row in self._proposers
            if (draft := self._proposers[row].draft(min(max_tokens, self._drafting.tokens)))
        }

    def matched(self, rows: Sequence[RowId]) -> tuple[tuple[RowId, int], ...]:
        return tuple(
            (row, n)
            for row in rows
            if row in self._proposers and (n := self._proposers[row].matched)
        )
