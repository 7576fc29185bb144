"""The interface of proposers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from trouper.protocol.plans import RowId


class Proposer(Protocol):
    """Proposes next tokens for rows. Drafts must be the same on every rank."""

    def open(self, row: RowId, prompt: Sequence[int], restored: int) -> None:
        """Add a row whose first `restored` tokens have KV."""

    def drop(self, rows: Iterable[RowId]) -> None:
        """Forget rows, known or not."""

    def append(self, tokens: Mapping[RowId, Sequence[int]]) -> None:
        """Add committed tokens. May name rows that are not open."""

    def drafts(self, requests: Mapping[RowId, int]) -> dict[RowId, list[int]]:
        """Propose drafts of 1 to requests[row] tokens. Rows without a draft are left out."""
