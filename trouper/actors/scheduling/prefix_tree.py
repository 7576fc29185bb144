"""The prefix tree: which tokens' KV is cached, where, and what may be evicted. Pure: no clock, no disk, no arrays.

One tree serves two kinds of lookup. Full blocks are found by key, one dictionary lookup each.
Where they end, the children of the last one are sorted by their tokens, so the one that shares the
most with the rest of a prompt is a neighbour of where the rest would be inserted: that gives reuse at
token granularity - a prompt that departs inside a block, or ends in one, or a text whose last block is
not full - without a second index to keep in step with the first.
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from operator import itemgetter
from typing import NamedTuple

import attrs
import numpy as np

from trouper.protocol.blocks import TOKEN_BYTES
from trouper.protocol.plans import BlockId

NODE_COST = 1024
"""Bytes of a node in this process besides its KV, so that even the number of empty blocks is bounded."""
_tokens = itemgetter(0)

Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Tokens as big-endian int32: bytes compare as tokens do, so children can be sorted by them."""
    return np.fromiter(tokens, ">i4").tobytes()


def common(a: bytes, b: bytes) -> int:
    """Number of tokens in the common prefix of two token strings."""
    size = min(len(a), len(b))
    a, b = a[:size], b[:size]
    if a == b:
        return size // TOKEN_BYTES
    if size <= 16 * TOKEN_BYTES:
        differ = int.from_bytes(a, "big") ^ int.from_bytes(b, "big")
        return (size - (differ.bit_length() + 7) // 8) // TOKEN_BYTES
    return int(np.argmax(np.frombuffer(a, ">i4") != np.frombuffer(b, ">i4")))


@attrs.define(eq=False)
class Node:
    """A node of the prefix tree: the tokens of one block after those of its parent. It is usable while its block is in memory or
    on disk."""

    key: bytes
    parent: Node | None
    tokens: bytes
    end: int
    """Number of tokens from the root to the end of this node."""
    block: BlockId | None = None
    snapshot: BlockId | None = None
    on_disk: bool = False
    snapshot_on_disk: bool = False
    queued: bool = False
    """Whether the node is on a list of nodes to write to disk."""
    pins: int = 0
    resident_children: int = 0
    """Number of children that are resident."""
    used: int = 0
    snapshot_used: int = 0
    _order: list[tuple[bytes, Node]] = attrs.field(factory=list)
    """Children, sorted by their tokens."""

    def __lt__(self, other: Node) -> bool:  # Siblings have distinct tokens, and entries of a heap distinct stamps.
        return self.key < other.key

    @property
    def size(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def start(self) -> int:
        return self.end - self.size

    @property
    def usable(self) -> bool:
        return self.block is not None or self.on_disk

    @property
    def is_resident(self) -> bool:
        """Whether the node or a descendant is in memory or pinned. The parent of a resident node is not evicted."""
        return self.block is not None or self.pins > 0 or self.resident_children > 0

    @property
    def has_snapshot(self) -> bool:
        return self.snapshot is not None or self.snapshot_on_disk

    @property
    def children(self) -> Iterator[Node]:
        return (node for _, node in self._order)

    def attach(self, child: Node) -> None:
        insort(self._order, (child.tokens, child))

    def detach(self, child: Node) -> None:
        del self._order[bisect_left(self._order, (child.tokens, child))]

    def nearest(self, rest: bytes) -> tuple[int, Node | None]:
        """The usable child that shares the most tokens with `rest`, and how many. The further from where `rest` would
        be inserted the less is shared, so the first usable one on either side is the best of that side."""
        place = bisect_left(self._order, (rest,))
        sides = range(place - 1, -1, -1), range(place, len(self._order))
        near = [next((node for n in side if (node := self._order[n][1]).usable), None) for side in sides]
        found = [(common(rest, node.tokens), node) for node in near if node is not None]
        return max(((n, node) for n, node in found if n), default=(0, None))

    def continued(self, rest: bytes) -> Node | None:
        """The longest usable child that is a prefix of `rest` and has a snapshot. All prefixes of `rest` are prefixes of
        what it shares with the last child that is not greater."""
        place = bisect_right(self._order, rest, key=_tokens)
        while place:
            tokens, node = self._order[place - 1]
            shared = common(rest, tokens) * TOKEN_BYTES
            if shared == len(tokens):
                if node.usable and node.has_snapshot:
                    return node
                shared -= TOKEN_BYTES
            rest = rest[:shared]
            place = bisect_right(self._order, rest, key=_tokens)
        return None


class Chain:
    """The tokens of one text, and the keys of its full blocks. A key is computed once, at its first lookup (F7)."""

    def __init__(self, root: Node, tokens: bytes, block_size: int, digest: Digest = sha256) -> None:
        self.root, self.tokens = root, bytearray(tokens)
        self._step = block_size * TOKEN_BYTES
        self._digest = digest
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def append(self, token: int) -> None:
        self.tokens += token.to_bytes(TOKEN_BYTES, "big")

    def part(self, start: int, end: int) -> bytes:
        return bytes(self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def key(self, place: int) -> bytes:
        """Key of full block number `place`."""
        keys, step = self._keys, self._step
        if place < len(keys):
            return keys[place]
        key = keys[-1] if keys else self.root.key
        for start in range(len(keys) * step, (place + 1) * step, step):
            key = self._digest(key + self.tokens[start : start + step])
            keys.append(key)
        return key


class PendingNode(NamedTuple):
    """A node on disk whose parent is not known yet: the root of another tenant, or a text that was not seen yet."""

    tokens: bytes
    payload: bool
    snapshot: bool


class Match(NamedTuple):
    """The cached prefix of a text. `nodes`: the nodes from the root on; the last one may be used in part."""

    nodes: tuple[Node, ...]
    tokens: int
    last: Node
    """The last full block that matched (or the root). A row that computes more continues here."""


@attrs.frozen(kw_only=True)
class Sizes:
    """Sizes of KV in bytes, and the capacity of the cache."""

    block_size: int
    token_bytes: int
    snapshot_bytes: int
    capacity_bytes: int
    capacity_blocks: int | None = None

    @property
    def max_blocks(self) -> int:
        """Number of full blocks that fit."""
        fit = self.capacity_bytes // (self.block_size * self.token_bytes + NODE_COST)
        return min(fit, self.capacity_blocks or fit)


@attrs.define
class Counts:
    """Counters since the start."""

    evicted_blocks: int = 0
    evicted_snapshots: int = 0
    refused: int = 0
    """Stores that found no room, since all other nodes were in use."""
    collisions: int = 0
    """Lookups whose key was that of other tokens. They count as misses."""


class Index:
    """The prefix tree. It assigns the ids of blocks and snapshots, and `freed` returns those that may be evicted."""

    def __init__(self, namespace: bytes, sizes: Sizes, digest: Digest = sha256) -> None:
        self.namespace, self.sizes = namespace, sizes
        self.counts = Counts()
        self._digest = digest
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}
        self._ids = count()
        self._clock = count(1)
        self._eviction_heap: list[tuple[int, int, Node]] = []
        """Candidates for eviction, oldest first: (stamp, 0 for a snapshot or 1 for a block, node). Entries whose stamp
        is no longer the node's are void."""
        self._freed: list[BlockId] = []
        self._pending: dict[bytes, dict[bytes, PendingNode]] = {}
        """Pending nodes by the key of their parent, then by their own key."""
        self._pending_parents: dict[bytes, bytes] = {}
        """Keys of the parents of pending nodes, by the node's own key."""
        self.bytes = 0
        self.blocks = 0
        self.snapshots = 0

    # -- finding ---------------------------------------------------------------------------------

    def root(self, salt: str = "") -> Node:
        """Root of the texts with this salt. Texts of different salts never share a node."""
        key = self._digest(self.namespace + salt.encode())
        if key not in self._roots:
            self._roots[key] = Node(key, None, b"", 0, pins=1)
            self._link_pending(self._roots[key])
        return self._roots[key]

    def chain(self, tokens: bytes, salt: str = "") -> Chain:
        return Chain(self.root(salt), tokens, self.sizes.block_size, self._digest)

    def match(self, chain: Chain, limit: int, *, at_snapshot: bool = False) -> Match:
        """The longest prefix of `chain`, at most `limit` tokens, that is in memory or on disk; with `at_snapshot`
        the longest at whose end there is a snapshot, too."""
        nodes = self._full_blocks(chain, limit)
        last = nodes[-1] if nodes else chain.root
        if at_snapshot:
            found = self._with_snapshot(chain, nodes, limit)
            return Match(found, found[-1].end if found else 0, last)
        shared, child = last.nearest(self._rest(chain, last, limit))
        return Match(nodes if child is None else (*nodes, child), last.end + shared, last)

    def _full_blocks(self, chain: Chain, limit: int) -> tuple[Node, ...]:
        known, size, tokens = self._nodes, self.sizes.block_size, chain.tokens
        parent, found = chain.root, list[Node]()
        for place in range(limit // size):
            node = known.get(chain.key(place))
            if node is None or (node.block is None and not node.on_disk):
                break
            at = place * size
            if (
                node.parent is not parent
                or node.end != at + size
                or not tokens.startswith(node.tokens, at * TOKEN_BYTES)
            ):
                self.counts.collisions += 1
                break
            found.append(node)
            parent = node
        return tuple(found)

    def _with_snapshot(self, chain: Chain, nodes: tuple[Node, ...], limit: int) -> tuple[Node, ...]:
        """The longest match that ends at a snapshot. The snapshot may be in the middle of a block of `nodes`, where an earlier text
        was cut and continued."""
        for full in range(len(nodes), -1, -1):
            node = nodes[full - 1] if full else chain.root
            part = node.continued(self._rest(chain, node, limit))
            if part is not None:
                return (*nodes[:full], part)
            if node.has_snapshot:
                return nodes[:full]
        return ()

    def _rest(self, chain: Chain, node: Node, limit: int) -> bytes:
        """The tokens that a child of this node would have."""
        return chain.part(node.end, min(limit, node.end + self.sizes.block_size))

    def child(self, parent: Node, tokens: bytes) -> Node | None:
        """The child with exactly these tokens, be its bytes in memory, on disk or neither."""
        node = self._nodes.get(self._digest(parent.key + tokens))
        return node if node is not None and node.parent is parent and node.tokens == tokens else None

    # -- keeping ---------------------------------------------------------------------------------

    def insert(self, parent: Node, tokens: bytes) -> Node | None:
        """The node of these tokens, with a block in memory: one that was there, or a new id that the caller must fill.
        None: no room can be made, or another text has its key."""
        key = self._digest(parent.key + tokens)
        node = self._nodes.get(key)
        if node is not None and (node.parent is not parent or node.tokens != tokens):
            self.counts.collisions += 1
            return None
        if node is not None and node.block is not None:
            self.touch((node,))
            return node
        pinned = node or parent
        self.pin(pinned)  # Making room must not evict the node that is continued.
        if self.make_room(self._cost(len(tokens) // TOKEN_BYTES), blocks=1):
            node = node or self._add(key, parent, tokens)
            self._fill(node)
        else:
            self.counts.refused += 1
            node = None
        self.unpin(pinned)
        return node

    def _fill(self, node: Node) -> None:
        if not node.is_resident:
            self._add_resident_child(node.parent)
        node.block = BlockId(next(self._ids))
        self.bytes += self._cost(node.size)
        self.blocks += 1
        self.touch((node,))
        self._link_pending(node)

    def add_snapshot(self, node: Node) -> BlockId | None:
        """The id of a new snapshot of this node; None if it has one, or there is no room."""
        if node.snapshot is not None:
            return None
        self.pin(node)
        if self.make_room(self.sizes.snapshot_bytes):
            node.snapshot = BlockId(next(self._ids))
            self.bytes += self.sizes.snapshot_bytes
            self.snapshots += 1
            self.used_snapshot(node)
        else:
            self.counts.refused += 1
        self.unpin(node)
        return node.snapshot

    def touch(self, nodes: Iterable[Node]) -> None:
        """Mark nodes as used now."""
        stamp = next(self._clock)
        for node in nodes:
            node.used = stamp
            self._offer(node)

    def used_snapshot(self, node: Node) -> None:
        node.snapshot_used = next(self._clock)
        heapq.heappush(self._eviction_heap, (node.snapshot_used, 0, node))

    def pin(self, node: Node) -> None:
        """Pin a node: neither the node nor its ancestors are evicted."""
        if not node.is_resident:
            self._add_resident_child(node.parent)
        node.pins += 1

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        assert node.pins >= 0, "unpinned more often than pinned"
        if not node.is_resident:
            self._remove_resident_child(node.parent)
        self._offer(node)
        if node.snapshot is not None:
            heapq.heappush(self._eviction_heap, (node.snapshot_used, 0, node))
        self._prune(node)

    def freed(self) -> tuple[BlockId, ...]:
        """Ids that were freed since the last call."""
        freed, self._freed = tuple(self._freed), []
        return freed

    # -- forgetting ------------------------------------------------------------------------------

    def make_room(self, cost: int, blocks: int = 0) -> bool:
        """Evict the least recently used nodes until `cost` more bytes fit. False if the remaining nodes are in use."""
        most, max_blocks = self.sizes.capacity_bytes, self.sizes.capacity_blocks
        if cost > most:
            return False
        while self.bytes + cost > most or (max_blocks is not None and self.blocks + blocks > max_blocks):
            if not self._evict_oldest():
                return False
        return True

    def shrink(self, excess: int) -> int:
        """Evict `excess` bytes, or as many as possible, under memory pressure. Returns the number of evicted bytes."""
        before = self.bytes
        while before - self.bytes < excess and self._evict_oldest():
            pass
        return before - self.bytes

    def _evict_oldest(self) -> bool:
        while self._eviction_heap:
            stamp, kind, node = heapq.heappop(self._eviction_heap)
            if kind == 0 and node.snapshot is not None and stamp == node.snapshot_used and not node.pins:
                self._forget_snapshot(node)
                self.counts.evicted_snapshots += 1
                self._prune(node)
                return True
            if kind == 1 and stamp == node.used and self._evictable(node):
                self._forget_block(node)
                self.counts.evicted_blocks += 1
                self._prune(node)
                return True
        return False

    def _evictable(self, node: Node) -> bool:
        return node.block is not None and not node.pins and not node.resident_children

    def _offer(self, node: Node) -> None:
        if self._evictable(node):
            heapq.heappush(self._eviction_heap, (node.used, 1, node))
        if len(self._eviction_heap) > 64 + 4 * (self.blocks + self.snapshots):
            self._eviction_heap = list({entry for entry in self._eviction_heap if self._valid(entry)})
            heapq.heapify(self._eviction_heap)

    def _valid(self, entry: tuple[int, int, Node]) -> bool:
        stamp, kind, node = entry
        if kind == 0:
            return node.snapshot is not None and stamp == node.snapshot_used
        return stamp == node.used and self._evictable(node)

    def _forget_block(self, node: Node) -> None:
        assert node.block is not None
        self._freed.append(node.block)
        node.block = None
        self.bytes -= self._cost(node.size)
        self.blocks -= 1
        self._remove_resident_child(node.parent)
        if node.snapshot is not None and not node.on_disk:
            self._forget_snapshot(node)

    def _add_resident_child(self, parent: Node | None) -> None:
        """Count one more resident child. A node whose first child becomes resident becomes resident itself, and so on upwards."""
        while parent is not None:
            resident = parent.is_resident
            parent.resident_children += 1
            parent = None if resident else parent.parent

    def _remove_resident_child(self, parent: Node | None) -> None:
        """Count one resident child less, and so on upwards."""
        while parent is not None:
            parent.resident_children -= 1
            self._offer(parent)
            parent = None if parent.is_resident else parent.parent

    def _forget_snapshot(self, node: Node) -> None:
        assert node.snapshot is not None
        self._freed.append(node.snapshot)
        node.snapshot = None
        self.bytes -= self.sizes.snapshot_bytes
        self.snapshots -= 1

    def _prune(self, node: Node) -> None:
        """Remove nodes that are neither in memory nor on disk and have no children."""
        while (parent := node.parent) is not None and not (
            node.usable or node.pins or node._order or self._nodes.get(node.key) is not node
        ):
            del self._nodes[node.key]
            parent.detach(node)
            node = parent

    def _add(self, key: bytes, parent: Node, tokens: bytes) -> Node:
        node = Node(key, parent, tokens, parent.end + len(tokens) // TOKEN_BYTES)
        assert parent.size in (0, self.sizes.block_size), "only full blocks are continued"
        self._nodes[key] = node
        parent.attach(node)
        return node

    def _cost(self, size: int) -> int:
        return size * self.sizes.token_bytes + NODE_COST

    # -- the disk --------------------------------------------------------------------------------

    def on_disk(self, parent_key: bytes, key: bytes, tokens: bytes, *, payload: bool, snapshot: bool) -> None:
        """Record a node on disk. It can be found once its parent is known."""
        parent = self._nodes.get(parent_key) or self._roots.get(parent_key)
        if parent is not None:
            self._learn([(parent, key, PendingNode(tokens, payload, snapshot))])
            return
        siblings = self._pending.setdefault(parent_key, {})
        before = siblings.get(key, PendingNode(tokens, payload=False, snapshot=False))
        siblings[key] = PendingNode(tokens, payload or before.payload, snapshot or before.snapshot)
        self._pending_parents[key] = parent_key

    def _learn(self, found: list[tuple[Node, bytes, PendingNode]]) -> None:
        """Add nodes of the disk with their parents and keys, then the pending nodes that continue them. (The loop replaces a
        recursion, since a text has thousands of blocks.)"""
        learnt = list[Node]()
        while found:
            parent, key, pending = found.pop()
            node = self._nodes.get(key)
            if node is None and self._continues(parent, key, pending.tokens):
                node = self._add(key, parent, pending.tokens)
            if node is not None and node.parent is parent and node.tokens == pending.tokens:
                node.on_disk |= pending.payload
                node.snapshot_on_disk |= pending.snapshot
                learnt.append(node)
                found += self._take_pending(node)
        for node in reversed(learnt):
            self._prune(node)

    def _continues(self, parent: Node, key: bytes, tokens: bytes) -> bool:
        full = self.sizes.block_size
        sound = parent.size in (0, full) and 0 < len(tokens) <= full * TOKEN_BYTES
        return sound and self._digest(parent.key + tokens) == key

    def _take_pending(self, node: Node) -> list[tuple[Node, bytes, PendingNode]]:
        pending = self._pending.pop(node.key, {})
        for key in pending:
            del self._pending_parents[key]
        return [(node, key, pending) for key, pending in pending.items()]

    def _link_pending(self, node: Node) -> None:
        """Link the pending nodes of a node that has become known."""
        if node.key in self._pending:
            self._learn(self._take_pending(node))

    def not_on_disk(self, key: bytes) -> None:
        """Record that the disk no longer has this node, or has it damaged."""
        self._drop_pending(key)
        node = self._nodes.get(key)
        if node is not None:
            node.on_disk = node.snapshot_on_disk = False
            if node.block is None and node.snapshot is not None:
                self._forget_snapshot(node)
            self._prune(node)

    def _drop_pending(self, key: bytes) -> None:
        """An orphan is gone before anybody knew it."""
        parent_key = self._pending_parents.pop(key, None)
        if parent_key is not None:
            del self._pending[parent_key][key]
            if not self._pending[parent_key]:
                del self._pending[parent_key]

    def nodes(self) -> Iterator[Node]:
        """All nodes, for checks and displays."""
        return iter(self._nodes.values())

    def known(self, key: bytes) -> Node | None:
        return self._nodes.get(key)
