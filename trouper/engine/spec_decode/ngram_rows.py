"""Drafts by prompt lookup for each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trouper.engine.spec_decode.prompt_lookup import Drafting, RowProposer
from trouper.protocol.plans import RowId


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
        """Return the match lengths for `Stepped.matched`."""
        return tuple(
            (row, n)
            for row in rows
            if row in self._proposers and (n := self._proposers[row].matched)
        )
