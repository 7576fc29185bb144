"""How an engine without MLX knows its own state, to compare it with what plans expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import attrs
import numpy as np

from trouper.protocol import ranks
from trouper.protocol.plans import Plan, RowId, Stepped
from trouper.protocol.ranks import Digest


@attrs.frozen
class Held:
    """One row: tokens in its KV, and whether it decodes."""

    tokens: int
    decodes: bool


@attrs.define
class Diary:
    """What the last steps did, which digests may be about."""

    after: dict[int, Stepped] = attrs.field(factory=dict)
    tokens: int = 0

    def note(self, stepped: Stepped, rows: Mapping[RowId, Held]) -> Stepped:
        """The answer as a rank gives it: with its hashes."""
        self.tokens = ranks.sequence([*stepped.rows, *stepped.tokens], self.tokens)
        order = ranks.sequence([*rows, sum(held.decodes for held in rows.values())])
        self.after[stepped.step] = stepped = attrs.evolve(
            stepped, order=order, tokens_hash=self.tokens
        )
        ranks.forget_old(self.after)
        return stepped

    def compare(
        self,
        plan: Plan,
        rows: Mapping[RowId, Held],
        blocks: Iterable[int],
        images: Iterable[int],
    ) -> None:
        """Raises `RankDiffers`."""
        if plan.digest is not None:
            own = self.digest(rows, blocks, images, plan.digest.settled)
            ranks.compare(plan.step, plan.digest, own)

    def digest(
        self,
        rows: Mapping[RowId, Held],
        blocks: Iterable[int],
        images: Iterable[int],
        settled: int,
    ) -> Digest:
        extra = Counter[RowId]()
        for step, stepped in self.after.items():
            if step > settled:
                extra.update({row: tokens - 1 for row, tokens in Counter(stepped.rows).items()})
        ids = ranks.ids_of(rows)
        then = self.after.get(settled, Stepped(-1))
        return Digest(
            rows=ranks.pairs(ids, np.array([held.decodes for held in rows.values()])),
            lengths=ranks.pairs(
                ids, np.array([held.tokens - extra[row] for row, held in rows.items()], np.int64)
            ),
            blocks=ranks.set_hash(ranks.ids_of(blocks)),
            images=ranks.set_hash(ranks.ids_of(images)),
            settled=settled,
            order=then.order,
            tokens=then.tokens_hash,
        )
