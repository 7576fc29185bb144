"""What this rank's state is, as hashes to compare with what a plan expects (`protocol/ranks.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trouper.engine.kv.block_store import BlockStore
from trouper.engine.kv.slot_rows import Rows
from trouper.protocol.plans import RowId
from trouper.protocol.ranks import Digest, forget_old, ids_of, pairs, sequence


class Digests:
    """Remembers what the last steps left. Without digests in plans nothing of it is called."""

    def __init__(self, rows: Rows, blocks: BlockStore | None) -> None:
        self._rows, self._blocks = rows, blocks
        self._settled: dict[int, tuple[int, int]] = {-1: (0, 0)}
        """Of each step that was read: the order of slots, and all tokens so far."""
        self._tokens = 0
        self._drafted: dict[int, tuple[tuple[RowId, int, int], ...]] = {}
        """Of steps that were read: what came of their drafts."""

    def order(self) -> int:
        """Of the rows in their slots, as they are now."""
        return sequence([*self._rows.order, len(self._rows.decoding)])

    def settle(self, step: int, order: int, rows: Sequence[RowId], tokens: Sequence[int]) -> int:
        """A step was read; the hash of all tokens so far."""
        self._tokens = sequence([*rows, *tokens], self._tokens)
        self._settled[step] = order, self._tokens
        forget_old(self._settled)
        return self._tokens

    def accepted(self, step: int, drafted: tuple[tuple[RowId, int, int], ...]) -> None:
        """What came of a step's drafts. A plan that was sent before rank 0 had its answer does not count on it."""
        self._drafted[step] = drafted
        forget_old(self._drafted)

    def knows(self, step: int) -> bool:
        """Whether it was read."""
        return step in self._settled

    def now(self, settled: int) -> Digest:
        """Before a plan changes anything."""
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
        return Digest(pairs(ids, decodes), pairs(ids, tokens), blocks, settled, slots, tokens_hash)
