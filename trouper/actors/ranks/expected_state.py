"""The expected state of every rank's engine, predicted from plans and corrected by results (F20).
Pure.

The state of the KV is each row's length alone.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from trouper.protocol import ranks
from trouper.protocol.media import ItemId
from trouper.protocol.plans import Admit, Chunk, Plan, RowId, Stepped
from trouper.protocol.ranks import Digest


class ExpectedState:
    """Rows in the order of admission, as arrays, so that a step costs the same for any number of
    rows."""

    def __init__(self) -> None:
        self._ids = np.zeros(0, np.uint64)
        self._lengths = np.zeros(0, np.int64)
        self._decoding = np.zeros(0, np.int64)
        self._indices: dict[RowId, int] = {}
        # Number of prompt tokens that no plan has prefilled yet, by row.
        self._unscheduled: dict[RowId, int] = {}
        self._embedded: set[RowId] = set()
        self._blocks = 0
        self._images: set[ItemId] = set()
        self._settled, self._order, self._tokens = -1, 0, 0
        # Rows that decoded last, and their indices.
        self._last: tuple[tuple[RowId, ...], np.ndarray[tuple[int], np.dtype[np.intp]]] = (
            (),
            np.zeros(0, np.intp),
        )

    @property
    def settled(self) -> int:
        return self._settled

    @property
    def lengths(self) -> dict[RowId, int]:
        return {row: int(self._lengths[index]) for row, index in self._indices.items()}

    def digest(self) -> Digest:
        return Digest(
            rows=ranks.pairs(self._ids, self._decoding),
            lengths=ranks.pairs(self._ids, self._lengths),
            blocks=self._blocks,
            images=ranks.set_hash(ranks.ids_of(self._images)),
            settled=self._settled,
            order=self._order,
            tokens=self._tokens,
        )

    def predict(self, plan: Plan) -> None:
        """Apply a plan before its result: each decoding row gets one token."""
        self._keep_blocks(plan)
        self._images.difference_update(plan.forget)
        self._images.update(order.item for order in plan.encode)
        if plan.drop:
            self._drop(plan.drop)
        for admit in plan.admit:
            self._admit(admit)
        if plan.decode:
            self._lengths[self._indices_of(plan.decode)] += 1
        for chunk in plan.prefill:
            self._prefill(chunk)

    def correct(self, stepped: Stepped) -> None:
        """Correct the state by rank 0's result: accepted drafts and state hashes, without dropped
        rows."""
        self._settled, self._order, self._tokens = stepped.step, stepped.order, stepped.tokens_hash
        if stepped.drafted:
            for row, tokens in Counter(stepped.rows).items():
                if row in self._indices:
                    self._lengths[self._indices[row]] += tokens - 1

    # -- what a plan changes ----------------------------------------------------------------------

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
        dropped = [self._indices[row] for row in rows]
        self._ids = np.delete(self._ids, dropped)
        self._lengths = np.delete(self._lengths, dropped)
        self._decoding = np.delete(self._decoding, dropped)
        for row in rows:
            self._unscheduled.pop(row, None)
            self._embedded.discard(row)
        self._reindex()

    def _admit(self, admit: Admit) -> None:
        known = admit.restore.tokens if admit.restore is not None else 0
        self._ids = np.append(self._ids, np.uint64(admit.row))
        self._lengths = np.append(self._lengths, known)
        self._decoding = np.append(self._decoding, 0)
        self._indices[admit.row] = len(self._ids) - 1
        self._unscheduled[admit.row] = len(admit.prompt) // 4 - known
        if admit.embed is not None:
            self._embedded.add(admit.row)

    def _reindex(self) -> None:
        self._indices = {RowId(row): index for index, row in enumerate(self._ids.tolist())}
        self._last = (), np.zeros(0, np.intp)

    def _indices_of(self, rows: tuple[RowId, ...]) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        if rows != self._last[0]:
            self._last = rows, np.array([self._indices[row] for row in rows], np.intp)
        return self._last[1]

    def _prefill(self, chunk: Chunk) -> None:
        index = self._indices[chunk.row]
        self._lengths[index] += chunk.tokens
        self._unscheduled[chunk.row] -= chunk.tokens
        if not self._unscheduled[chunk.row] and chunk.row not in self._embedded:
            self._decoding[index] = 1
