"""The engine's proposers, of which a plan names one for each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Protocol

import mlx.core as mx

from trouper.engine.kv.head_rows import HeadRows
from trouper.engine.kv.rows import Rows
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.spec_decode.draft_model import DraftLimits, DraftModel
from trouper.engine.spec_decode.prompt_lookup import Drafting, NgramRows
from trouper.protocol.plans import ProposerName, RowId

MAX_UNREAD = 256
"""Number of steps after which proposers get tokens even if no plan drafts."""


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


class HeadProposer:
    """`Proposer` by an MTP head or a drafter that reads taps, over the hidden states and KV of
    `HeadRows`."""

    def __init__(
        self, rows: HeadRows, max_tokens: int, agree: Callable[[mx.array], mx.array]
    ) -> None:
        """`max_tokens`: maximum length of a draft. `agree` returns rank 0's tokens."""
        self._rows, self._max_tokens, self._agree = rows, max_tokens, agree
        self.name = rows.proposer

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
        self._rows.complete(ends)

    def keep_up(self, feed: Callable[[], None]) -> None:
        """Compute KV of rows that rest, if hidden states of many passes wait. `feed` appends the
        committed tokens."""
        self._rows.keep_up(feed)


class DraftProposals:
    """The proposers by name, and the committed tokens that wait for the next drafts."""

    def __init__(
        self,
        drafting: Drafting,
        draft_model: DraftModel | None = None,
        head: HeadProposer | None = None,
    ) -> None:
        self._ngrams, self._head, self.max_tokens = NgramRows(drafting), head, drafting.tokens
        self._proposers: dict[ProposerName, Proposer] = {"ngram": self._ngrams}
        self._with_kv = [proposer for proposer in (draft_model, head) if proposer is not None]
        if draft_model is not None:
            self._proposers["draft_model"] = draft_model
        if head is not None:
            self._proposers[head.name] = head
        self.given: dict[RowId, list[int]] = {}
        """Drafts that replace those of the proposers while a device warms up."""
        self._open: set[RowId] = set()
        self._unread: list[tuple[Sequence[RowId], Sequence[int]]] = []

    @classmethod
    def of(
        cls,
        drafting: Drafting,
        rows: Rows,
        agree: Callable[[mx.array], mx.array],
        limits: DraftLimits,
    ) -> DraftProposals:
        """Make the proposers whose KV `rows` have. `agree` returns rank 0's tokens. `limits`: of
        the draft model."""
        draft, head = (rows.draft, rows.head) if isinstance(rows, SlotRows) else (None, None)
        return cls(
            drafting,
            None if draft is None else DraftModel(draft, drafting.tokens, agree, limits),
            None if head is None else HeadProposer(head, drafting.tokens, agree),
        )

    @property
    def with_passes(self) -> Sequence[ProposerName]:
        return [name for name in self._proposers if name != "ngram"]

    def wants(self, *, ngrams: bool) -> bool:
        """Whether `open` is due for a row. `ngrams`: whether the row may draft from its own
        text."""
        return ngrams or bool(self._with_kv)

    def open(
        self, row: RowId, prompt: Sequence[int], restored: int = 0, *, ngrams: bool = True
    ) -> None:
        """As `Proposer.open`. `ngrams`: whether to index the prompt."""
        for name, proposer in self._proposers.items():
            if ngrams or name != "ngram":
                proposer.open(row, prompt, restored)
                self._open.add(row)

    def drop(self, rows: Iterable[RowId]) -> None:
        for proposer in self._proposers.values():
            proposer.drop(rows)
        self._open.difference_update(rows)

    def append(self, rows: Sequence[RowId], tokens: Sequence[int]) -> None:
        if self._open:
            self._unread.append((rows, tokens))
            if len(self._unread) > MAX_UNREAD:
                self._feed_proposers()

    def drafts(
        self, requests: Mapping[RowId, int], names: Mapping[RowId, ProposerName] | None = None
    ) -> dict[RowId, list[int]]:
        """As `Proposer.drafts`. `names`: the proposer of each row, prompt lookup by default."""
        self._feed_proposers()
        if self.given:
            return dict(self.given)
        names = names or {}
        drafts: dict[RowId, list[int]] = {}
        for name, proposer in self._proposers.items():
            own = {
                row: size
                for row, size in requests.items()
                if size and names.get(row, "ngram") == name
            }
            drafts |= proposer.drafts(own)
        return drafts

    def matched(self, rows: Sequence[RowId]) -> tuple[tuple[RowId, int], ...]:
        self._feed_proposers()
        return self._ngrams.matched(rows)

    def complete(self, ends: Mapping[RowId, int]) -> None:
        """Complete the proposers' KV of each row up to `ends[row]` tokens, before it is copied."""
        if self._with_kv and ends:
            self._feed_proposers()
            for proposer in self._with_kv:
                proposer.complete(ends)

    def keep_up(self) -> None:
        """Let a head catch up with rows that rest. Must be called in each step."""
        if self._head is not None:
            self._head.keep_up(self._feed_proposers)

    def _feed_proposers(self) -> None:
        """Pass the unread tokens to the proposers, grouped by consecutive steps with the same
        rows."""
        unread, self._unread = self._unread, []
        for rows, steps in groupby(unread, itemgetter(0)):
            fed: dict[RowId, list[int]] = {}
            for row, row_tokens in zip(
                rows, zip(*(tokens for _, tokens in steps), strict=True), strict=True
            ):
                fed.setdefault(row, []).extend(row_tokens)
            for proposer in self._proposers.values():
                proposer.append(fed)
