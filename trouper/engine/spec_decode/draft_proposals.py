"""The rows that may draft: what they are told, and what they want verified.

Proposers hear of tokens when they are asked, which is seldom: no step costs anything for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from trouper.engine.spec_decode.prompt_lookup import Drafting, Proposer
from trouper.protocol.plans import RowId


class DraftProposals:
    """Each row's proposer, and the tokens that they were not told yet."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._proposers: dict[RowId, Proposer] = {}
        self._unread: list[tuple[Sequence[RowId], Sequence[int]]] = []

    def open(self, row: RowId, prompt: Sequence[int]) -> None:
        self._proposers[row] = self._drafting.proposer(prompt)

    def drop(self, rows: Iterable[RowId]) -> None:
        for row in rows:
            self._proposers.pop(row, None)

    def took(self, rows: Sequence[RowId], tokens: Sequence[int]) -> None:
        """What a step committed."""
        if self._proposers:
            self._unread.append((rows, tokens))

    def drafts(self, requests: Mapping[RowId, int]) -> dict[RowId, list[int]]:
        """Of each row that has something, at most so many tokens."""
        self._feed_proposers()
        return {
            row: draft
            for row, max_tokens in requests.items()
            if max_tokens and row in self._proposers
            if (draft := self._proposers[row].draft(min(max_tokens, self._drafting.tokens)))
        }

    def matched(self, rows: Sequence[RowId]) -> tuple[tuple[RowId, int], ...]:
        """As `Stepped.matched`."""
        self._feed_proposers()
        return tuple((row, n) for row in rows if row in self._proposers and (n := self._proposers[row].matched))

    def _feed_proposers(self) -> None:
        """Each all of its tokens at once, of steps that had the same rows. A step with drafts names rows twice; the next
        one is never told with it, since rows are asked what they draft in between, or have nothing drafted."""
        unread, self._unread = self._unread, []
        for rows, steps in groupby(unread, itemgetter(0)):
            for row, row_tokens in zip(rows, zip(*(tokens for _, tokens in steps), strict=True), strict=True):
                if row in self._proposers:
                    self._proposers[row].took(row_tokens)
