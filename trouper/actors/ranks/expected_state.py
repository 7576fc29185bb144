"""What every rank's engine must hold, foretold from the plans and corrected by the results. Pure.

Rank 0's RankMirror keeps it, so that each plan can say which state it expects (F20). It knows of KV only how long it is:
that, and who is there, are what the shapes in the collectives follow from.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from trouper.protocol import ranks
from trouper.protocol.plans import Admit, Chunk, Plan, RowId, Stepped
from trouper.protocol.ranks import Digest


class ExpectedState:
    """Rows in the order in which they came, as arrays: a step costs the same for one row and for many."""

    def __init__(self) -> None:
        self._ids = np.zeros(0, np.uint64)
        self._lengths = np.zeros(0, np.int64)
        self._decoding = np.zeros(0, np.int64)
        self._places: dict[RowId, int] = {}
        self._left: dict[RowId, int] = {}
        """Prompt tokens that no plan has prefilled yet, of rows that prefill."""
        self._embedded: set[RowId] = set()
        self._blocks = 0
        self._settled, self._order, self._tokens = -1, 0, 0
        self._last: tuple[tuple[RowId, ...], np.ndarray[tuple[int], np.dtype[np.intp]]] = (), np.zeros(0, np.intp)
        """The rows that decoded last, and where they are."""

    @property
    def settled(self) -> int:
        """The last step whose answer is known."""
        return self._settled

    @property
    def lengths(self) -> dict[RowId, int]:
        """Tokens in each row's KV, for checks."""
        return {row: int(self._lengths[place]) for row, place in self._places.items()}

    def digest(self) -> Digest:
        """Of the state before the next plan."""
        return Digest(
            rows=ranks.pairs(self._ids, self._decoding),
            lengths=ranks.pairs(self._ids, self._lengths),
            blocks=self._blocks,
            settled=self._settled,
            order=self._order,
            tokens=self._tokens,
        )

    def follow(self, plan: Plan) -> None:
        """The plan is done, as far as it is known before its answer: each row that decodes gets one token."""
        self._keep_blocks(plan)
        if plan.drop:
            self._drop(plan.drop)
        for admit in plan.admit:
            self._admit(admit)
        if plan.decode:
            self._lengths[self._places_of(plan.decode)] += 1
        for chunk in plan.prefill:
            self._prefill(chunk)

    def take(self, stepped: Stepped) -> None:
        """Rank 0's answer: which drafts were accepted, and what its state is a hash of. Rows that have left meanwhile
        are nobody's."""
        self._settled, self._order, self._tokens = stepped.step, stepped.order, stepped.tokens_hash
        if stepped.drafted:
            for row, tokens in Counter(stepped.rows).items():
                if row in self._places:
                    self._lengths[self._places[row]] += tokens - 1

    # -- what a plan changes -----------------------------------------------------------------------

    def _keep_blocks(self, plan: Plan) -> None:
        if plan.evict:
            self._blocks = ranks.parted(self._blocks, plan.evict)
        for store in plan.store:
            self._blocks = ranks.joined(self._blocks, store.blocks)
            if store.snapshot is not None:
                self._blocks = ranks.joined(self._blocks, (store.snapshot,))
        if plan.load:
            self._blocks = ranks.joined(self._blocks, [load.block for load in plan.load])

    def _drop(self, rows: tuple[RowId, ...]) -> None:
        gone = [self._places[row] for row in rows]
        self._ids, self._lengths, self._decoding = (
            np.delete(self._ids, gone),
            np.delete(self._lengths, gone),
            np.delete(self._decoding, gone),
        )
        for row in rows:
            self._left.pop(row, None)
            self._embedded.discard(row)
        self._place()

    def _admit(self, admit: Admit) -> None:
        known = admit.restore.tokens if admit.restore is not None else 0
        self._ids = np.append(self._ids, np.uint64(admit.row))
        self._lengths = np.append(self._lengths, known)
        self._decoding = np.append(self._decoding, 0)
        self._places[admit.row] = len(self._ids) - 1
        self._left[admit.row] = len(admit.prompt) // 4 - known
        if admit.embed is not None:
            self._embedded.add(admit.row)

    def _place(self) -> None:
        self._places = {RowId(row): place for place, row in enumerate(self._ids.tolist())}
        self._last = (), np.zeros(0, np.intp)

    def _places_of(self, rows: tuple[RowId, ...]) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        if rows != self._last[0]:
            self._last = rows, np.array([self._places[row] for row in rows], np.intp)
        return self._last[1]

    def _prefill(self, chunk: Chunk) -> None:
        """With a prompt's last token its row decodes: that token is not prefilled, but is in the KV all the same."""
        place = self._places[chunk.row]
        self._lengths[place] += chunk.tokens
        self._left[chunk.row] -= chunk.tokens
        if not self._left[chunk.row] and chunk.row not in self._embedded:
            self._decoding[place] = 1
