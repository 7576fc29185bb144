"""Drafts of the model's own MTP head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import mlx.core as mx

from trouper.engine.kv.head_rows import HeadRows
from trouper.protocol.plans import RowId


class HeadProposer:
    """`Proposer` by an MTP head, over the hidden states and KV of `HeadRows`."""

    def __init__(
        self, rows: HeadRows, max_tokens: int, agree: Callable[[mx.array], mx.array]
    ) -> None:
        """`max_tokens`: maximum length of a draft. `agree` returns rank 0's tokens."""
        self._rows, self._max_tokens, self._agree = rows, max_tokens, agree

    def open(self, row: RowId, prompt: Sequence[int], restored: int) -> None:
        self._rows.open(row, prompt, restored)

    def drop(self, rows: Iterable[RowId]) -> None:
        for row in rows:
            self._rows.drop(row)

    def append(self, tokens: Mapping[RowId, Sequence[int]]) -> None:
        for row, more in tokens.items():
            if row in self._rows.tokens:
                self._rows.tokens[row] += more

    def drafts(self, requests: Mapping[RowId, int]) -> dict[RowId, list[int]]:
        sizes = {
            row: min(size, self._max_tokens)
            for row, size in requests.items()
            if row in self._rows.tokens
        }
        return self._rows.draft(sizes, self._agree, self._max_tokens + 1) if sizes else {}

    def complete(self, ends: Mapping[RowId, int]) -> None:
        """Compute the KV of each row's first `ends[row]` tokens, before it is copied."""
        self._rows.complete(ends)

    def keep_up(self, feed: Callable[[], None]) -> None:
        """Compute KV of rows that rest, if hidden states of many passes wait. `feed` appends the
        committed tokens."""
        self._rows.keep_up(feed)
