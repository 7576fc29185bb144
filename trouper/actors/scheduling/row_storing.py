"""Storing of rows as blocks and snapshots, and reuse of live rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import attrs

from trouper.actors.scheduling.eviction import Eviction, Sizes
from trouper.actors.scheduling.prefix_tree import PrefixTree
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.tree_node import Chain, Node, common
from trouper.protocol.blocks import BlockRef
from trouper.protocol.plans import PLANS_IN_FLIGHT, RowId, Store
from trouper.protocol.work import Run

MAX_QUEUED_CHAINS = 4096
"""Waiting chains; the oldest are dropped beyond."""


@attrs.frozen(eq=False)
class InFlightWrite:
    """Consecutive nodes in flight to the disk, valid even after eviction."""

    run: Run
    nodes: tuple[Node, ...]
    nbytes: int


class WriteQueue:
    """`enabled`: whether there is a disk tier."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self.enabled = False
        # Chains of consecutive nodes that wait to be written.
        self._chains: deque[deque[Node]] = deque()
        # Blocks in flight by key, each with its parent's key.
        self._in_flight: dict[bytes, tuple[bytes, BlockRef]] = {}

    def add(self, node: Node | None) -> None:
        """Queue a node, and its parents up to one that is queued or saved."""
        if not self.enabled:
            return
        nodes: deque[Node] = deque()
        while node is not None and node.parent is not None:
            if node.queued or self._is_saved(node):
                break
            node.queued = True
            nodes.appendleft(node)
            node = node.parent
        if nodes:
            self._chains.append(nodes)
        while len(self._chains) > MAX_QUEUED_CHAINS:
            self._drop_oldest()

    def _is_saved(self, node: Node) -> bool:
        return (
            node.on_disk and (node.snapshot is None or node.snapshot_on_disk)
        ) or node.key in self._in_flight

    def next_run(self, max_bytes: int) -> InFlightWrite | None:
        """The next nodes of one chain to write: in memory and not on disk yet."""
        while self._chains:
            nodes = self._chains[0]
            run = self._take(nodes, max_bytes)
            if not run or not nodes:
                self._drop_oldest()
            if run:
                return self._send(run)
        return None

    def _take(self, nodes: deque[Node], max_bytes: int) -> list[Node]:
        # The rest is not visited: a long prompt has thousands of nodes, and a run of a large model
        # only a few.
        run: list[Node] = []
        nbytes = 0
        while nodes and self._is_saved(nodes[0]):
            nodes.popleft().queued = False
        while nodes:
            nbytes += self._bytes_of(nodes[0])
            is_full = run and nbytes > max_bytes
            if is_full or nodes[0].block is None or self._is_saved(nodes[0]):
                break
            run.append(nodes.popleft())
            run[-1].queued = False
        return run

    def _drop_oldest(self) -> None:
        for node in self._chains.popleft():
            node.queued = False

    def _bytes_of(self, node: Node) -> int:
        return (
            node.size * self._sizes.token_bytes
            + (node.snapshot is not None) * self._sizes.snapshot_bytes
        )

    def _send(self, nodes: list[Node]) -> InFlightWrite:
        parent = nodes[0].parent
        assert parent is not None
        run = Run(
            parent.key,
            tuple(
                BlockRef(node.key, node.tokens, snapshot=node.snapshot is not None)
                for node in nodes
            ),
        )
        self._in_flight |= {ref.key: (parent_key, ref) for parent_key, ref in run.linked()}
        return InFlightWrite(run, tuple(nodes), sum(map(self._bytes_of, nodes)))

    def keep_in_flight(self, keys: Iterable[bytes]) -> None:
        """Forget all other blocks in flight, which will not be answered."""
        self._in_flight = {key: self._in_flight[key] for key in keys if key in self._in_flight}

    def answered(self, keys: Iterable[bytes]) -> list[tuple[bytes, BlockRef]]:
        """Blocks that have left flight, each with the parent's key."""
        return [sent for key in keys if (sent := self._in_flight.pop(key, None)) is not None]


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
            computed = min(shared, row.num_computed_tokens)
            promised = min(shared, row.num_prefill_tokens - 1)
            if tails and tokens >= last.end and computed > match.tokens:
                match = LiveMatch(computed, row)
            if promised > max(until, row.num_computed_tokens):
                until, primary = promised, row
        if primary is None or until <= match.tokens:
            return match
        return match._replace(primary=primary, until=until)


# Full blocks are stored by the plan after the last chunk. The *tail* behind them is stored when the
# row ends, or has grown by `TAIL_TOKENS`; until then other rows copy the tail from the row. A
# *primary* is a row that prefills tokens which a waiting prompt shares.
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
