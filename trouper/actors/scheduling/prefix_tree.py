"""The prefix tree: tokens with cached KV, and the KV's location. Pure: no clock, no disk, no
arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakValueDictionary

import attrs

from trouper.actors.scheduling.cache_namespace import NO_SCOPE, root_of
from trouper.actors.scheduling.eviction import Eviction, Sizes
from trouper.actors.scheduling.tree_node import Chain, Digest, Node, sha256
from trouper.protocol.blocks import TOKEN_BYTES, BlockRef
from trouper.protocol.plans import BlockId
from trouper.protocol.requests import CacheScope


class PendingNodes:
    """Disk blocks by the key of a parent outside the tree."""

    # For a tenant yet to come, or from a text announced from its end.

    def __init__(self) -> None:
        self._by_parent: dict[bytes, dict[bytes, BlockRef]] = {}
        self._parents: dict[bytes, bytes] = {}

    def add(self, parent_key: bytes, ref: BlockRef) -> None:
        siblings = self._by_parent.setdefault(parent_key, {})
        if (before := siblings.get(ref.key)) is not None:
            ref = attrs.evolve(
                ref, payload=ref.payload or before.payload, snapshot=ref.snapshot or before.snapshot
            )
        siblings[ref.key] = ref
        self._parents[ref.key] = parent_key

    def take(self, parent_key: bytes) -> tuple[BlockRef, ...]:
        refs = self._by_parent.pop(parent_key, None)
        if refs is None:
            return ()
        for key in refs:
            del self._parents[key]
        return tuple(refs.values())

    def drop(self, key: bytes) -> None:
        parent_key = self._parents.pop(key, None)
        if parent_key is not None:
            del self._by_parent[parent_key][key]
            if not self._by_parent[parent_key]:
                del self._by_parent[parent_key]


class Match(NamedTuple):
    """The cached prefix of a text. `nodes` begins at the root; the last may be used in part."""

    nodes: tuple[Node, ...]
    tokens: int
    last: Node
    """The last full block that matched, or the root, where a row continues."""


# Full blocks are found by key. The last one's children are sorted by tokens, with the longest
# common prefix next to the insertion point: reuse at token granularity.
class PrefixTree:
    def __init__(self, namespace: bytes, sizes: Sizes, digest: Digest = sha256) -> None:
        self.namespace, self.sizes = namespace, sizes
        self.eviction = Eviction(sizes, self._prune)
        self.collisions = 0
        """Lookups that hit a key of other tokens; counted as misses."""
        self._digest = digest
        self._nodes: dict[bytes, Node] = {}
        # Weak: a client may send another salt with each request.
        self._roots: WeakValueDictionary[bytes, Node] = WeakValueDictionary()
        self._pending = PendingNodes()

    def root(self, salt: str = "", scope: CacheScope = NO_SCOPE) -> Node:
        key = self._digest(self.namespace + root_of(salt, scope))
        root = self._roots.get(key)
        if root is None:
            self._roots[key] = root = Node(key, None, b"", 0, pins=1)
            self._link_pending(root)
        return root

    def chain(self, tokens: bytes, salt: str = "", scope: CacheScope = NO_SCOPE) -> Chain:
        return Chain(self.root(salt, scope), tokens, self.sizes.block_size, self._digest)

    def nodes(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def known(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def child(self, parent: Node, tokens: bytes) -> Node | None:
        """The child with exactly these tokens, wherever the data is."""
        node = self._nodes.get(self._digest(parent.key + tokens))
        return (
            node if node is not None and node.parent is parent and node.tokens == tokens else None
        )

    # -- lookup ----------------------------------------------------------------------------------

    def match(self, chain: Chain, limit: int, *, at_snapshot: bool = False) -> Match:
        """The longest prefix of `chain` in memory or on disk, at most `limit` tokens; with
        `at_snapshot` up to a snapshot."""
        nodes = self._full_blocks(chain, limit)
        last = nodes[-1] if nodes else chain.root
        if at_snapshot:
            found = self._with_snapshot(chain, nodes, limit)
            return Match(found, found[-1].end if found else 0, last)
        shared, child = last.nearest(self._tokens_after(chain, last, limit))
        return Match(nodes if child is None else (*nodes, child), last.end + shared, last)

    def _full_blocks(self, chain: Chain, limit: int) -> tuple[Node, ...]:
        known, size, tokens = self._nodes, self.sizes.block_size, chain.tokens
        parent, found = chain.root, list[Node]()
        for index in range(limit // size):
            node = known.get(chain.key(index))
            if node is None or (node.block is None and not node.on_disk):
                break
            at = index * size
            if (
                node.parent is not parent
                or node.end != at + size
                or not tokens.startswith(node.tokens, at * TOKEN_BYTES)
            ):
                self.collisions += 1
                break
            found.append(node)
            parent = node
        return tuple(found)

    def _with_snapshot(self, chain: Chain, nodes: tuple[Node, ...], limit: int) -> tuple[Node, ...]:
        # The snapshot may be in the middle of a block of `nodes`, where an earlier text was cut and
        # continued.
        for full in range(len(nodes), -1, -1):
            node = nodes[full - 1] if full else chain.root
            part = node.longest_with_snapshot(self._tokens_after(chain, node, limit))
            if part is not None:
                return (*nodes[:full], part)
            if node.has_snapshot:
                return nodes[:full]
        return ()

    def _tokens_after(self, chain: Chain, node: Node, limit: int) -> bytes:
        return chain.part(node.end, min(limit, node.end + self.sizes.block_size))

    # -- blocks in memory ------------------------------------------------------------------------

    def insert(self, parent: Node, tokens: bytes) -> Node | None:
        """The node of these tokens, with a block or a new id to fill. None without room, or for a
        key in use."""
        key = self._digest(parent.key + tokens)
        node = self._nodes.get(key)
        if node is not None and (node.parent is not parent or node.tokens != tokens):
            self.collisions += 1
            return None
        if node is not None and node.block is not None:
            self.eviction.touch((node,))
            return node
        nbytes = self.sizes.block_bytes(len(tokens) // TOKEN_BYTES)
        if not self.eviction.make_room(nbytes, blocks=1, keep=node or parent):
            return None
        # Making room may have removed it.
        node = self._nodes.get(key) or self._add(key, parent, tokens)
        self.eviction.add_block(node)
        self._link_pending(node)
        return node

    def add_snapshot(self, node: Node) -> BlockId | None:
        """Id of a new snapshot; None if one exists, or without room."""
        if node.snapshot is not None or not self.eviction.make_room(
            self.sizes.snapshot_bytes, keep=node
        ):
            return None
        self.eviction.add_snapshot(node)
        return node.snapshot

    def _add(self, key: bytes, parent: Node, tokens: bytes) -> Node:
        node = Node(key, parent, tokens, parent.end + len(tokens) // TOKEN_BYTES)
        assert parent.size in (0, self.sizes.block_size), "only full blocks are continued"
        assert parent.parent is None or self._nodes.get(parent.key) is parent, (
            "the parent is no longer in the tree"
        )
        self._nodes[key] = node
        parent.attach(node)
        return node

    def _prune(self, node: Node) -> None:
        """Remove the node, and then parents, as far as nobody needs them."""
        while (parent := node.parent) is not None:
            is_needed = node.usable or node.pins or not node.is_leaf
            if is_needed or self._nodes.get(node.key) is not node:
                return
            del self._nodes[node.key]
            parent.detach(node)
            node = parent

    # -- blocks on disk --------------------------------------------------------------------------

    def on_disk(self, parent_key: bytes, ref: BlockRef) -> None:
        """Record a block, reachable once the parent is known."""
        parent = self._nodes.get(parent_key) or self._roots.get(parent_key)
        if parent is not None:
            self._link([(parent, ref)])
        else:
            self._pending.add(parent_key, ref)

    def _link_pending(self, node: Node) -> None:
        if pending := self._pending.take(node.key):
            self._link([(node, ref) for ref in pending])

    def _link(self, found: list[tuple[Node, BlockRef]]) -> None:
        """Add disk blocks to parents, then pending blocks that follow."""
        # A loop, no recursion: a text has thousands of blocks.
        linked = list[Node]()
        while found:
            parent, ref = found.pop()
            node = self._nodes.get(ref.key)
            if node is None and self._continues(parent, ref):
                node = self._add(ref.key, parent, ref.tokens)
            if node is not None and node.parent is parent and node.tokens == ref.tokens:
                node.on_disk |= ref.payload
                node.snapshot_on_disk |= ref.snapshot
                linked.append(node)
                found += [(node, child) for child in self._pending.take(node.key)]
        for node in reversed(linked):
            self._prune(node)

    def _continues(self, parent: Node, ref: BlockRef) -> bool:
        full = self.sizes.block_size
        sound = parent.size in (0, full) and 0 < len(ref.tokens) <= full * TOKEN_BYTES
        return sound and self._digest(parent.key + ref.tokens) == ref.key

    def not_on_disk(self, key: bytes) -> None:
        self._pending.drop(key)
        node = self._nodes.get(key)
        if node is not None:
            node.on_disk = node.snapshot_on_disk = False
            if node.block is None and node.snapshot is not None:
                self.eviction.drop_snapshot(node)
            self._prune(node)
