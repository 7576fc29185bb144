"""Order of eviction, and the cache's bounds in bytes and blocks. Pure: counts only. Least recently
used leaves go first, as in SGLang's radix cache."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count

import attrs

from trouper.actors.scheduling.tree_node import Node
from trouper.protocol.plans import BlockId

# A child cannot be found without its parent. A snapshot has a time of use of its own and may be
# evicted alone.
#
# Rows and loads pin nodes. A pin locks the node and all ancestors; the bytes of all others are
# `evictable_bytes`. Locks propagate to the first locked ancestor only.

NODE_COST = 1024
"""Bytes of a node besides KV, which bound even empty blocks."""
SNAPSHOT, BLOCK = 0, 1


@attrs.frozen(kw_only=True)
class Sizes:
    block_size: int
    token_bytes: int
    snapshot_bytes: int
    capacity_bytes: int
    capacity_blocks: int | None = None

    def block_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.token_bytes + NODE_COST

    @property
    def max_blocks(self) -> int:
        fit = self.capacity_bytes // self.block_bytes(self.block_size)
        return min(fit, self.capacity_blocks or fit)


class Eviction:
    """Blocks and snapshots in memory. `prune` gets each node that may be superfluous."""

    def __init__(self, sizes: Sizes, prune: Callable[[Node], None]) -> None:
        self.sizes, self._prune = sizes, prune
        self.bound_bytes: int | None = None
        """Further bound for additions: memory left by rows."""
        self.bytes = 0
        self.evictable_bytes = 0
        """Blocks without lock and snapshots without pin."""
        self.blocks = 0
        self.snapshots = 0
        self.evicted_blocks = 0
        self.evicted_snapshots = 0
        self.refused = 0
        self._ids = count()
        self._clock = count(1)
        # Candidates, oldest first: (stamp, SNAPSHOT or BLOCK, node). Entries with an outdated stamp
        # are void.
        self._heap: list[tuple[int, int, Node]] = []
        self._freed: list[BlockId] = []
        # Nodes that are pinned until the plan in composition is sent.
        self._unsent: list[Node] = []

    # -- use -------------------------------------------------------------------------------------

    def touch(self, nodes: Iterable[Node]) -> None:
        stamp = next(self._clock)
        for node in nodes:
            node.last_used = stamp
            self._offer(node)

    def touch_snapshot(self, node: Node) -> None:
        node.snapshot_last_used = next(self._clock)
        heapq.heappush(self._heap, (node.snapshot_last_used, SNAPSHOT, node))

    def pin(self, node: Node) -> None:
        if not node.is_resident:
            self._add_resident_child(node.parent)
        if not node.pins and node.snapshot is not None:
            self.evictable_bytes -= self.sizes.snapshot_bytes
        node.pins += 1
        self._lock(node)

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        assert node.pins >= 0, "unpinned more often than pinned"
        self._unlock(node)
        if not node.is_resident:
            self._remove_resident_child(node.parent)
        self._offer(node)
        if node.snapshot is not None:
            self.evictable_bytes += 0 if node.pins else self.sizes.snapshot_bytes
            heapq.heappush(self._heap, (node.snapshot_last_used, SNAPSHOT, node))
        self._prune(node)

    def pin_until_sent(self, node: Node) -> None:
        """Pin a node that the current plan fills against eviction by the same plan."""
        self.pin(node)
        self._unsent.append(node)

    def freed(self) -> tuple[BlockId, ...]:
        """Ids that the current plan evicts, after which the plan is sent."""
        freed, self._freed = tuple(self._freed), []
        unsent, self._unsent = self._unsent, []
        for node in unsent:
            self.unpin(node)
        return freed

    def _lock(self, node: Node | None) -> None:
        while node is not None:
            node.locks += 1
            if node.locks > 1:
                return
            self.evictable_bytes -= self._bytes_of(node)
            node = node.parent

    def _unlock(self, node: Node | None) -> None:
        while node is not None:
            node.locks -= 1
            if node.locks:
                return
            self.evictable_bytes += self._bytes_of(node)
            node = node.parent

    def _bytes_of(self, node: Node) -> int:
        return 0 if node.block is None else self.sizes.block_bytes(node.size)

    # -- blocks in memory ------------------------------------------------------------------------

    def add_block(self, node: Node) -> None:
        """Give a node a new block id for the caller to fill, given room."""
        if not node.is_resident:
            self._add_resident_child(node.parent)
        node.block = BlockId(next(self._ids))
        self._count_bytes(self.sizes.block_bytes(node.size), evictable=not node.locks)
        self.blocks += 1
        self.touch((node,))

    def add_snapshot(self, node: Node) -> None:
        """Give a node a new snapshot id for the caller to fill, given room."""
        node.snapshot = BlockId(next(self._ids))
        self._count_bytes(self.sizes.snapshot_bytes, evictable=not node.pins)
        self.snapshots += 1
        self.touch_snapshot(node)

    def drop_snapshot(self, node: Node) -> None:
        assert node.snapshot is not None
        self._freed.append(node.snapshot)
        node.snapshot = None
        self._count_bytes(-self.sizes.snapshot_bytes, evictable=not node.pins)
        self.snapshots -= 1

    def _drop_block(self, node: Node) -> None:
        assert node.block is not None
        self._freed.append(node.block)
        node.block = None
        self._count_bytes(-self.sizes.block_bytes(node.size), evictable=not node.locks)
        self.blocks -= 1
        self._remove_resident_child(node.parent)
        if node.snapshot is not None and not node.on_disk:
            self.drop_snapshot(node)

    def _count_bytes(self, nbytes: int, *, evictable: bool) -> None:
        self.bytes += nbytes
        self.evictable_bytes += nbytes if evictable else 0

    def _add_resident_child(self, parent: Node | None) -> None:
        # A node whose first child becomes resident becomes resident, and so on upwards.
        while parent is not None:
            resident = parent.is_resident
            parent.resident_children += 1
            parent = None if resident else parent.parent

    def _remove_resident_child(self, parent: Node | None) -> None:
        while parent is not None:
            parent.resident_children -= 1
            self._offer(parent)
            parent = None if parent.is_resident else parent.parent

    # -- evicting --------------------------------------------------------------------------------

    def make_room(self, nbytes: int, blocks: int = 0, *, keep: Node) -> bool:
        """Evict until `nbytes` and `blocks` fit, sparing `keep` and all ancestors. False if the
        rest is in use."""
        fits = self._fits(nbytes, blocks)
        if not fits and nbytes <= self._capacity_bytes:
            self.pin(keep)
            while not fits and self._evict_oldest():
                fits = self._fits(nbytes, blocks)
            self.unpin(keep)
        self.refused += not fits
        return fits

    def _fits(self, nbytes: int, blocks: int) -> bool:
        max_blocks = self.sizes.capacity_blocks
        if max_blocks is not None and self.blocks + blocks > max_blocks:
            return False
        return self.bytes + nbytes <= self._capacity_bytes

    @property
    def _capacity_bytes(self) -> int:
        capacity = self.sizes.capacity_bytes
        return capacity if self.bound_bytes is None else min(capacity, self.bound_bytes)

    def evict(self, nbytes: int) -> int:
        """Evict up to `nbytes` bytes, and return the number."""
        before = self.bytes
        while before - self.bytes < nbytes and self._evict_oldest():
            pass
        return before - self.bytes

    def _evict_oldest(self) -> bool:
        while self._heap:
            entry = heapq.heappop(self._heap)
            _, kind, node = entry
            if not self._valid(entry):
                continue
            if kind == SNAPSHOT:
                self.drop_snapshot(node)
                self.evicted_snapshots += 1
            else:
                self._drop_block(node)
                self.evicted_blocks += 1
            self._prune(node)
            return True
        return False

    def _evictable(self, node: Node) -> bool:
        return node.block is not None and not node.pins and not node.resident_children

    def _offer(self, node: Node) -> None:
        if self._evictable(node):
            heapq.heappush(self._heap, (node.last_used, BLOCK, node))
        if len(self._heap) > 64 + 4 * (self.blocks + self.snapshots):
            self._heap = list({entry for entry in self._heap if self._valid(entry)})
            heapq.heapify(self._heap)

    def _valid(self, entry: tuple[int, int, Node]) -> bool:
        stamp, kind, node = entry
        if kind == SNAPSHOT:
            return node.snapshot is not None and stamp == node.snapshot_last_used and not node.pins
        return stamp == node.last_used and self._evictable(node)
