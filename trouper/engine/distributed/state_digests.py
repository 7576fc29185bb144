"""Hashes of this rank's state, for comparison with a plan's (`protocol/ranks.py`)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import TypeAlias

import attrs
import numpy as np

from trouper.engine.kv.block_store import BlockStore
from trouper.engine.kv.rows import Rows
from trouper.protocol.plans import RowId, Stepped
from trouper.protocol.ranks import Digest, forget_old, ids_of, pairs, sequence, set_hash

Drafted: TypeAlias = tuple[tuple[RowId, int, int], ...]
"""(row, draft tokens, accepted tokens), as in `Stepped.drafted`."""


class Digests:
    """Used only if plans have digests. `images`: ids of the present ones."""

    def __init__(
        self, rows: Rows, blocks: BlockStore | None, images: AbstractSet[int] = frozenset()
    ) -> None:
        self._rows, self._blocks, self._images = rows, blocks, images
        self._settled: dict[int, tuple[int, int]] = {-1: (0, 0)}
        """Hashes of slot order and of all tokens, by step."""
        self._tokens = 0
        self._drafted: dict[int, Drafted] = {}
        """Drafts by step; plans sent before rank 0 had the result omit these."""

    def order(self) -> int:
        return sequence([*self._rows.order, len(self._rows.decoding)])

    def settle(self, stepped: Stepped, order: int) -> Stepped:
        """Record a step, and add the hashes for comparison. `order`: hash of slots after launch."""
        self._tokens = sequence([*stepped.rows, *stepped.tokens], self._tokens)
        self._settled[stepped.step] = order, self._tokens
        forget_old(self._settled)
        self._drafted[stepped.step] = stepped.drafted
        forget_old(self._drafted)
        return attrs.evolve(stepped, order=order, tokens_hash=self._tokens)

    def knows(self, step: int) -> bool:
        return step in self._settled

    def now(self, settled: int) -> Digest:
        """`settled`: the last step in the plan."""
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
            images=set_hash(ids_of(self._images)),
            settled=settled,
            order=slots,
            tokens=tokens_hash,
        )
