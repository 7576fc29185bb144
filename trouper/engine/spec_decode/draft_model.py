"""The proposer by a draft model: a smaller model with the same vocabulary continues each row greedily.

Mlx-lm drafts so for one request (`speculative_generate_step`). Here one pass drafts a token for all rows (`DraftRows`). A row
that rests runs nothing; before it drafts, and before its KV is stored or copied, what it lacks is caught up in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import mlx.core as mx

from trouper.engine.kv.draft_rows import DraftRows
from trouper.protocol.plans import RowId

FED_AT_ONCE = 2
"""Maximum number of tokens that the first pass of a draft runs. After a draft that was right to its end a row lacks two: the last
drafted token, which only the target has seen, and the one that was sampled behind it."""


class DraftModel:
    """Implements `Proposer` for all rows."""

    def __init__(self, rows: DraftRows, max_tokens: int, agree: Callable[[mx.array], mx.array]) -> None:
        """`max_tokens`: maximum length of a draft. `agree` returns rank 0's tokens."""
        self._rows, self._max_tokens, self._agree = rows, max_tokens, agree
        self._tokens: dict[RowId, list[int]] = {}
        """Tokens of each row that are committed and known here."""
        self._ahead: dict[RowId, list[int]] = {}
        """Drafted tokens behind these that the draft model has run. How many of them were right is known when tokens are appended."""

    def open(self, row: RowId, prompt: Sequence[int], restored: int) -> None:
        self._tokens[row] = list(prompt)
        self._rows.lengths[row] = restored

    def drop(self, rows: Iterable[RowId]) -> None:
        for row in rows:
            self._ahead.pop(row, None)
            if self._tokens.pop(row, None) is not None:
                del self._rows.lengths[row]

    def append(self, tokens: Mapping[RowId, Sequence[int]]) -> None:
        """Add committed tokens, and take the KV of drafted tokens back that are others."""
        for row, more in tokens.items():
            if row not in self._tokens:
                continue
            if (ahead := self._ahead.pop(row, None)) is not None:
                right = next((n for n, pair in enumerate(zip(ahead, more, strict=False)) if pair[0] != pair[1]), None)
                kept = min(len(ahead), len(more)) if right is None else right
                self._rows.lengths[row] = len(self._tokens[row]) + kept
            self._tokens[row] += more

    def drafts(self, requests: Mapping[RowId, int]) -> dict[RowId, list[int]]:
        sizes = {row: min(size, self._max_tokens) for row, size in requests.items() if row in self._tokens}
        if not sizes:
            return {}
        lacking = {row: self._lacking(row, len(self._tokens[row])) for row in sizes}
        self._rows.prefill({row: tokens[:-1] for row, tokens in lacking.items() if len(tokens) > FED_AT_ONCE})
        fed = {row: tokens if len(tokens) <= FED_AT_ONCE else tokens[-1:] for row, tokens in lacking.items()}
        drafts = self._rows.propose(fed, sizes, self._agree)
        self._ahead |= {row: draft[:-1] for row, draft in drafts.items()}
        return drafts

    def complete(self, ends: Mapping[RowId, int]) -> None:
        """Compute the KV of each row's first `ends[row]` tokens, where it lacks some, so that it can be copied."""
        self._rows.prefill({row: self._lacking(row, end) for row, end in ends.items() if row in self._tokens})

    def _lacking(self, row: RowId, end: int) -> list[int]:
        return self._tokens[row][self._rows.lengths[row] : end]
