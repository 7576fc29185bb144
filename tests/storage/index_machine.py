"""Hypothesis plays with an `PrefixTree` and with dictionaries that promise the same; after each
rule they agree."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.storage.naive import Flags, NaiveTree, Path, Tokens
from trouper.actors.scheduling.eviction import NODE_COST, Sizes
from trouper.actors.scheduling.prefix_tree import Match, PrefixTree
from trouper.actors.scheduling.tree_node import Chain, Node, token_bytes
from trouper.protocol.blocks import TOKEN_BYTES, BlockRef

BLOCK = 4
TOKEN_COST = 100
SNAPSHOT_COST = 700
NAMESPACE = b"n" * 32

salts = st.sampled_from(["", "", "tenant"])
texts = st.lists(st.integers(0, 2), min_size=1, max_size=3 * BLOCK + 2).map(tuple)
"""So few tokens that texts share prefixes, leave each other in the middle of blocks, and end
there."""
picks = st.integers(0, 2**16)
flags = st.sampled_from(
    [Flags(payload=True), Flags(payload=True, snapshot=True), Flags(snapshot=True)]
)


class IndexMachine(RuleBasedStateMachine):
    """The rules. `index_class` is replaced by broken ones to show that this would notice."""

    index_class: ClassVar[type[PrefixTree]] = PrefixTree

    @initialize(
        capacity=st.integers(NODE_COST, 9 * (NODE_COST + BLOCK * TOKEN_COST)),
        blocks=st.one_of(st.none(), st.integers(1, 7)),
    )
    def start(self, capacity: int, blocks: int | None) -> None:
        self.sizes = Sizes(
            block_size=BLOCK,
            token_bytes=TOKEN_COST,
            snapshot_bytes=SNAPSHOT_COST,
            capacity_bytes=capacity,
            capacity_blocks=blocks,
        )
        self.stored: dict[Path, Flags] = {}
        """The disk, whatever the index has been told of it."""
        self.open()

    def open(self) -> None:
        self.index = self.index_class(NAMESPACE, self.sizes)
        self.model = NaiveTree(self.sizes)
        self.handed_out: set[int] = set()

    # -- names -----------------------------------------------------------------------------------

    def chain(self, salt: str, tokens: Tokens) -> Chain:
        self.model.root(salt)
        return self.index.chain(token_bytes(tokens), salt)

    def key(self, path: Path) -> bytes:
        """What the key is does not depend on what the index holds."""
        salt, tokens = path
        key = self.index._digest(NAMESPACE + salt.encode())
        for start in range(0, len(tokens), BLOCK):
            key = self.index._digest(key + token_bytes(tokens[start : start + BLOCK]))
        return key

    def node(self, path: Path) -> Node:
        node = self.index.known(self.key(path))
        assert node is not None, f"{path} is not known"
        return node

    def paths(self) -> dict[Path, Node]:
        found: dict[Path, Node] = {}
        for node in self.index.nodes():
            tokens, root = node.tokens, node
            while root.parent is not None:
                root = root.parent
                tokens = root.tokens + tokens
            salt = next(salt for salt in self.model.salts if self.index.root(salt) is root)
            found[salt, numbers(tokens)] = node
        return found

    def pick(
        self, paths: Sequence[Path] | set[Path] | dict[Path, object], number: int
    ) -> Path | None:
        ordered = sorted(paths)
        return ordered[number % len(ordered)] if ordered else None

    # -- rules -----------------------------------------------------------------------------------

    @rule(salt=salts, tokens=texts, snapshot_every=st.integers(0, 3))
    def insert(self, salt: str, tokens: Tokens, snapshot_every: int) -> None:
        """As a row does it: each node pinned while the next one is stored."""
        parent = self.chain(salt, tokens).root
        for start in range(0, len(tokens), BLOCK):
            path = salt, tokens[: start + BLOCK]
            node = self.index.insert(parent, token_bytes(tokens[start : start + BLOCK]))
            assert self.model.insert(path) is (node is not None)
            if node is None:
                break
            self._handed_out(node.block)
            if snapshot_every and start // BLOCK % snapshot_every == snapshot_every - 1:
                self._snapshot(path)
                if path not in self.model.nodes():  # Its own snapshot took its place.
                    break
            parent = node

    @rule(number=picks)
    def snapshot(self, number: int) -> None:
        path = self.pick([path for path in self.model.nodes() if self.model.usable(path)], number)
        if path is not None:
            self._snapshot(path)

    def _snapshot(self, path: Path) -> None:
        snapshot = self.index.add_snapshot(self.node(path))
        assert self.model.add_snapshot(path) is (snapshot is not None)
        self._handed_out(snapshot)

    def _handed_out(self, id_: int | None) -> None:
        if id_ is not None:
            self.handed_out.add(id_)

    @rule(salt=salts, tokens=texts, used=st.booleans())
    def look_up(self, salt: str, tokens: Tokens, used: bool) -> None:
        for limit in range(len(tokens) + 1):
            for at_snapshot in (False, True):
                match = self.index.match(self.chain(salt, tokens), limit, at_snapshot=at_snapshot)
                assert match.tokens == self.model.longest(
                    salt, tokens[:limit], at_snapshot=at_snapshot
                )
                self._check_match(match, tokens[:limit])
                assert not (at_snapshot and match.nodes) or match.nodes[-1].has_snapshot
        if used:
            self.index.eviction.touch(match.nodes)
            self.model.touch([(salt, tokens[: node.end]) for node in match.nodes])
            if match.nodes:
                self.index.eviction.touch_snapshot(match.nodes[-1])
                self.model.used_snapshot((salt, tokens[: match.tokens]))

    def _check_match(self, match: Match, tokens: Tokens) -> None:
        """One after another from the root, each usable, as many tokens as were promised."""
        assert all(node.usable for node in match.nodes)
        for before, node in zip(match.nodes, match.nodes[1:], strict=False):
            assert node.parent is before
        text = b"".join(node.tokens for node in match.nodes)
        assert (
            text[: match.tokens * TOKEN_BYTES] == token_bytes(tokens)[: match.tokens * TOKEN_BYTES]
        )
        assert match.tokens <= len(text) // TOKEN_BYTES < match.tokens + BLOCK
        assert match.last.end % BLOCK == 0

    @rule(number=picks)
    def pin(self, number: int) -> None:
        path = self.pick(self.model.nodes(), number)
        if path is not None:
            self.index.eviction.pin(self.node(path))
            self.model.pin(path)

    @precondition(lambda self: self.model.pins)
    @rule(number=picks)
    def unpin(self, number: int) -> None:
        path = self.pick(self.model.pins, number)  # type: ignore[arg-type]
        assert path is not None
        self.index.eviction.unpin(self.node(path))
        self.model.unpin(path)

    @rule(excess=st.integers(1, 3 * NODE_COST))
    def shrink(self, excess: int) -> None:
        evictable = self.index.eviction.evictable_bytes
        evicted = self.index.eviction.evict(excess)
        assert evicted == self.model.shrink(excess)
        assert evicted >= min(excess, evictable), "fewer bytes were freed than promised"

    @rule()
    def evict_all(self) -> None:
        evictable = self.index.eviction.evictable_bytes
        assert self.index.eviction.evict(2**40) == self.model.shrink(2**40) == evictable

    @rule(number=picks, snapshot=st.booleans())
    def write(self, number: int, snapshot: bool) -> None:
        """The disk has it from now on, with what it continues, or without."""
        path = self.pick(self.model.memory, number)  # type: ignore[arg-type]
        if path is not None:
            self._on_disk(path, Flags(payload=True, snapshot=snapshot))

    @rule(salt=salts, tokens=texts, flags=flags)
    def another_server_writes(self, salt: str, tokens: Tokens, flags: Flags) -> None:
        """Whatever it continues need not be known here, or ever."""
        self._on_disk((salt, tokens), flags)

    def _on_disk(self, path: Path, flags: Flags) -> None:
        self.stored.setdefault(path, Flags()).add(flags)
        self._tell(path, flags)

    def _tell(self, path: Path, flags: Flags) -> None:
        parent = self.model.parent(path)
        tokens = token_bytes(path[1][len(parent[1]) :])
        self.model.on_disk(path, flags)
        self.index.on_disk(
            self.key(parent), BlockRef(self.key(path), tokens, flags.payload, flags.snapshot)
        )

    @precondition(lambda self: self.stored)
    @rule(number=picks)
    def lose(self, number: int) -> None:
        path = self.pick(self.stored, number)  # type: ignore[arg-type]
        assert path is not None
        del self.stored[path]
        self.index.not_on_disk(self.key(path))
        self.model.not_on_disk(path)

    @rule(seed=picks)
    def crash(self, seed: int) -> None:
        """Only the disk is left, and told of in any order."""
        self.open()
        paths = sorted(self.stored)
        Random(seed).shuffle(paths)
        for path in paths:
            self._tell(path, self.stored[path])

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def the_same_is_freed(self) -> None:
        """In the same order: least recently used first, each once."""
        freed = self.index.eviction.freed()
        assert list(freed) == self.model.freed
        assert self.handed_out.issuperset(freed), "freed twice, or never handed out"
        self.handed_out.difference_update(freed)
        self.model.freed.clear()
        assert self.handed_out == {*self.model.memory.values(), *self.model.snapshots.values()}

    @invariant()
    def the_same_is_held(self) -> None:
        paths = self.paths()
        assert paths.keys() == self.model.nodes(), (
            "a node that is nowhere and leads nowhere, or one that is missing"
        )
        for path, node in paths.items():
            assert node.block == self.model.memory.get(path)
            assert node.snapshot == self.model.snapshots.get(path)
            assert Flags(node.on_disk, node.snapshot_on_disk) == self.model.disk.get(path, Flags())
            assert node.pins == self.model.pins.get(path, 0)
            assert node.end == len(path[1])

    @invariant()
    def sums_are_right_and_within_bounds(self) -> None:
        nodes = list(self.index.nodes())
        blocks = [node for node in nodes if node.block is not None]
        snapshots = [node for node in nodes if node.snapshot is not None]
        tokens = sum(node.size for node in blocks)
        assert self.index.eviction.blocks == len(blocks)
        assert self.index.eviction.snapshots == len(snapshots)
        assert (
            self.index.eviction.bytes
            == len(blocks) * NODE_COST + tokens * TOKEN_COST + len(snapshots) * SNAPSHOT_COST
        )
        assert self.index.eviction.evictable_bytes == self.model.evictable_bytes
        assert self.index.eviction.bytes <= self.sizes.capacity_bytes
        assert self.sizes.capacity_blocks is None or len(blocks) <= self.sizes.capacity_blocks

    @invariant()
    def children_are_sorted(self) -> None:
        for node in (*self.index.nodes(), *map(self.index.root, sorted(self.model.salts))):
            children = list(node.children)
            assert [child.tokens for child in children] == sorted(
                child.tokens for child in children
            )
            assert all(child.parent is node for child in children)
            assert node.resident_children == sum(child.is_resident for child in children)


def numbers(tokens: bytes) -> Tokens:
    return tuple(
        int.from_bytes(tokens[at : at + TOKEN_BYTES], "big")
        for at in range(0, len(tokens), TOKEN_BYTES)
    )
