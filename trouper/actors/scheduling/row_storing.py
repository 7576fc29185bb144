"""Storing of rows as blocks and snapshots, and reuse of live rows.

Full blocks are stored by the plan after the last chunk. The *tail* behind them is stored when the
row ends, or has grown by `TAIL_TOKENS`; until then other rows copy the tail from the row. A
*primary* is a row that prefills tokens which a waiting prompt shares.
"""

from __future__ import annotations

from typing import NamedTuple

import attrs

from trouper.actors.scheduling.eviction import Eviction
from trouper.actors.scheduling.prefix_tree import PrefixTree
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.tree_node import Chain, Node, common
from trouper.actors.scheduling.write_queue import WriteQueue
from trouper.protocol.plans import PLANS_IN_FLIGHT, RowId, Store

TAIL_TOKENS = 256
"""Length at which an answer's tail is stored: no step copies much."""


class LiveMatch(NamedTuple):
    tokens: int
    """Tokens not to compute, with the tail of `source`."""
    source: Sequence | None = None
    primary: Sequence | None = None
    until: int = 0


class LiveRows:
    """Live rows, by the pinned node at which each row's stored blocks end."""

    def __init__(self, eviction: Eviction) -> None:
        self._eviction = eviction
        self._rows: dict[Node, dict[RowId, Sequence]] = {}

    def attach(self, row: Sequence, node: Node) -> None:
        self._eviction.pin(node)
        self.detach(row)
        row.node = node
        self._rows.setdefault(node, {})[row.id] = row

    def detach(self, row: Sequence) -> None:
        if row.node is None:
            return
        rows = self._rows[row.node]
        del rows[row.id]
        if not rows:
            del self._rows[row.node]
        self._eviction.unpin(row.node)
        row.node = None

    def extend(
        self, chain: Chain, limit: int, last: Node, tokens: int, *, tails: bool
    ) -> LiveMatch:
        """Extend a match of `tokens` tokens, whose full blocks end at `last`, by live rows."""
        # A tail begins behind the last full block, so only a match of all full blocks can continue
        # in one, and only if `tails`: rings and states cannot be copied at a token.
        match, until, primary = LiveMatch(tokens), 0, None
        prompt = chain.part(last.end, limit)
        for row in self._rows.get(last, {}).values():
            shared = last.end + common(prompt, row.chain.part(last.end, limit))
            if shared <= tokens:
                continue
            computed, promised = (
                min(shared, row.num_computed_tokens),
                min(shared, row.num_prefill_tokens - 1),
            )
            if tails and tokens >= last.end and computed > match.tokens:
                match = LiveMatch(computed, row)
            if promised > max(until, row.num_computed_tokens):
                until, primary = promised, row
        if primary is None or until <= match.tokens:
            return match
        return match._replace(primary=primary, until=until)


@attrs.frozen(eq=False)
class RowStoring:
    """`snapshot_tokens`: interval of snapshots; None: the model needs none."""

    _tree: PrefixTree
    _live: LiveRows
    _writes: WriteQueue
    _snapshot_tokens: int | None

    def computed(self, row: Sequence) -> list[Store]:
        if row.node is None:
            return []
        at = row.num_computed_tokens
        stores = self._store(
            row,
            min(at, row.num_tokens),
            at if self._snapshot_due(row) and at <= row.num_tokens else None,
        )
        if not row.prefilling:
            self._writes.add(row.node)
        return stores

    def due(self, row: Sequence) -> bool:
        """Whether a decoding row has a long tail or meets a boundary. If not, sets
        `Sequence.stores_from`."""
        # After a failed store the next attempt waits for as many tokens again: each attempt hashes
        # the block and looks for a victim.
        missing = max(TAIL_TOKENS, self._tree.sizes.block_size)
        if row.node is not None:  # Else it stores nothing before it enters again.
            missing += max(row.node.end, row.no_room_at) - row.num_tokens
            if missing <= 0 or self._snapshot_due(row):
                return True
            # Sent plans count, of which more may be unanswered then than now.
            if self._snapshot_tokens is not None:
                missing = min(missing, row.until_snapshot(self._snapshot_tokens) - PLANS_IN_FLIGHT)
        row.stores_from = row.num_output_tokens + missing
        return False

    def ended(self, row: Sequence) -> list[Store]:
        """Stores all KV of an ending row, while the engine still has the row (F12)."""
        if row.node is None:
            return []
        at = min(row.num_computed_tokens, row.num_tokens)
        stores: list[Store] = []
        if self._snapshot_tokens is None or row.num_computed_tokens <= row.num_tokens:
            stores = self._store(row, at, at)
            self._writes.add(row.node)
        self._live.detach(row)
        return stores

    def _snapshot_due(self, row: Sequence) -> bool:
        return self._snapshot_tokens is not None and row.snapshot_due(self._snapshot_tokens)

    def _store(self, row: Sequence, end: int, cut: int | None) -> list[Store]:
        """Stores of full blocks up to `end`; with `cut` also the part up to there, with the
        snapshot."""
        stores: list[Store] = []
        size = self._tree.sizes.block_size
        node = row.node
        assert node is not None
        for start in range(node.end, end - size + 1, size):
            following = self._store_block(row, node, start, start + size, stores)
            if following is None:
                row.no_room_at, cut = row.num_tokens, None
                break
            node = following
        if node is not row.node:
            self._live.attach(row, node)
        if cut is not None and cut >= node.end:
            self._store_cut(row, node, cut, stores)
        return stores

    def _store_cut(self, row: Sequence, node: Node, cut: int, stores: list[Store]) -> None:
        part = node if cut == node.end else self._store_block(row, node, node.end, cut, stores)
        if part is None or part.parent is None:
            return
        if self._snapshot_tokens is None:
            self._writes.add(part)
            return
        snapshot = self._tree.add_snapshot(part)
        row.snapshot_at = cut
        if snapshot is None:
            return
        self._tree.eviction.pin_until_sent(part)
        self._writes.add(part)
        if stores and stores[-1].start + sum(stores[-1].sizes) == cut:
            stores[-1] = attrs.evolve(stores[-1], snapshot=snapshot)
        else:
            stores.append(Store(row.id, cut, (), (), snapshot))

    def _store_block(
        self, row: Sequence, parent: Node, start: int, end: int, stores: list[Store]
    ) -> Node | None:
        """The node of these tokens. A new store joins `stores`, or the last one."""
        tokens = row.chain.part(start, end)
        before = self._tree.child(parent, tokens)
        in_memory = before is not None and before.block is not None
        node = self._tree.insert(parent, tokens)
        if node is None or in_memory:
            return node
        assert node.block is not None
        self._tree.eviction.pin_until_sent(node)
        if (
            stores
            and stores[-1].start + sum(stores[-1].sizes) == start
            and stores[-1].snapshot is None
        ):
            last = stores[-1]
            stores[-1] = attrs.evolve(
                last, sizes=(*last.sizes, end - start), blocks=(*last.blocks, node.block)
            )
        else:
            stores.append(Store(row.id, start, (end - start,), (node.block,)))
        return node
