"""Draft proposals of the rows that may speculate.

Proposers get committed tokens only when drafts are requested, which is seldom, so other steps cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from trouper.engine.spec_decode.prompt_lookup import Drafting, Proposer
from trouper.protocol.plans import RowId


class DraftProposals:
    """The proposer of each row, and the committed tokens that the proposers have not received yet."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._proposers: dict[RowId, Proposer] = {}
        self._unread: list[tuple[Sequence[RowId], Sequence[int]]] = []

    def open(self, row: RowId, prompt: Sequence[int]) -> None:
        """Index a row's prompt, so that the row may draft."""
        self._proposers[row] = self._drafting.proposer(prompt)

    def drop(self, rows: Iterable[RowId]) -> None:
        """Forget rows."""
        for row in rows:
            self._proposers.pop(row, None)

    def append(self, rows: Sequence[RowId], tokens: Sequence[int]) -> None:
        """Add the tokens that a step committed."""
        if self._proposers:
            self._unread.append((rows, tokens))

    def drafts(self, requests: Mapping[RowId, int]) -> dict[RowId, list[int]]:
        """Propose drafts. `requests`: maximum number of draft tokens of each row. Rows without a draft are left out."""
        self._feed_proposers()
        return {
            row: draft
            for row, max_tokens in requests.items()
            if max_tokens and row in self._proposers
            if (draft := self._proposers[row].draft(min(max_tokens, self._drafting.tokens)))
        }

    def matched(self, rows: Sequence[RowId]) -> tuple[tuple[RowId, int], ...]:
        """Return the match lengths for `Stepped.matched`."""
        self._feed_proposers()
        return tuple((row, n) for row in rows if row in self._proposers and (n := self._proposers[row].matched))

    def _feed_proposers(self) -> None:
        """Pass the unread tokens to the proposers, grouped by steps that had the same rows. A step with drafts names rows
        twice; it is never grouped with the next one, since drafts are requested in between, or no row had a draft."""
        unread, self._unread = self._unread, []
        for rows, steps in groupby(unread, itemgetter(0)):
            for row, row_tokens in zip(rows, zip(*(tokens for _, tokens in steps), strict=True), strict=True):
                if row in self._proposers:
                    self._proposers[row].append(row_tokens)
