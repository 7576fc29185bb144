"""Hashes of this rank's state, to compare with the state that a plan expects
(`protocol/ranks.py`)."""

from __future__ import annotations

from typing import TypeAlias

import attrs
import numpy as np

from trouper.engine.kv.block_store import BlockStore
from trouper.engine.kv.rows import Rows
from trouper.protocol.plans import RowId, Stepped
from trouper.protocol.ranks import Digest, forget_old, ids_of, pairs, sequence

Drafted: TypeAlias = tuple[tuple[RowId, int, int], ...]
"""(row, draft tokens, accepted tokens) of each row that had a draft, as in `Stepped.drafted`."""


class Digests:
    """Records the state after the last steps. Used only if plans have digests."""

    def __init__(self, rows: Rows, blocks: BlockStore | None) -> None:
        self._rows, self._blocks = rows, blocks
        self._settled: dict[int, tuple[int, int]] = {-1: (0, 0)}
        """For each step that was read: hashes of the order of slots, and of all tokens so far."""
        self._tokens = 0
        self._drafted: dict[int, Drafted] = {}
        """The drafts of each step that was read. A plan that was sent before rank 0 had the step's
        result does not count them."""

    def order(self) -> int:
        """Hash the present order of rows in their slots."""
        return sequence([*self._rows.order, len(self._rows.decoding)])

    def settle(self, stepped: Stepped, order: int) -> Stepped:
        """Record a step that was read, and add the hashes that other ranks must agree on. `order`:
        hash of the order of slots after its launch."""
        self._tokens = sequence([*stepped.rows, *stepped.tokens], self._tokens)
        self._settled[stepped.step] = order, self._tokens
        forget_old(self._settled)
        self._drafted[stepped.step] = stepped.drafted
        forget_old(self._drafted)
        return attrs.evolve(stepped, order=order, tokens_hash=self._tokens)

    def knows(self, step: int) -> bool:
        """Whether the step was read."""
        return step in self._settled

    def now(self, settled: int) -> Digest:
        """Compute the digest before a plan changes the state. `settled`: the last step whose result
        the plan includes."""
        order, lengths = self._rows.order, self._rows.lengths()
        for step, drafted in self._drafted.items():
            for row, _, accepted in drafted if step > settled else ():
                if row in lengths:
                    lengths[row] -= accepted
        ids = ids_of(order)
        decodes = np.arange(len(order)) < len(self._rows.decoding)
        tokens = np.fromiter((lengths[row] for row in order), np.uint64, len(order))
        blocks = self._blocks.members if self._blocks is not None else 0
        slots, tokens_hash = self._settled[settled]
        return Digest(
            rows=pairs(ids, decodes),
            lengths=pairs(ids, tokens),
            blocks=blocks,
            settled=settled,
            order=slots,
            tokens=tokens_hash,
        )
