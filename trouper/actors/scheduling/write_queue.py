"""Cached blocks that wait for the disk, and those in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import attrs

from trouper.actors.scheduling.eviction import Sizes
from trouper.actors.scheduling.tree_node import Node
from trouper.protocol.blocks import BlockRef
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
        """Queue a node and all ancestors."""
        nodes: deque[Node] = deque()
        while (
            self.enabled
            and node is not None
            and node.parent is not None
            and not (node.queued or self._is_saved(node))
        ):
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
            if nodes[0].block is None or self._is_saved(nodes[0]) or (run and nbytes > max_bytes):
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
