"""The prefix index: what it finds, what it lets go, what it costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import sha256

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tests.family_configs import LONG
from tests.storage.index_machine import BLOCK, NAMESPACE, SNAPSHOT_COST, TOKEN_COST, IndexMachine
from trouper.actors.scheduling.eviction import NODE_COST, Eviction, Sizes
from trouper.actors.scheduling.prefix_tree import PrefixTree
from trouper.actors.scheduling.tree_node import Digest, Node, common, token_bytes
from trouper.actors.scheduling.tree_node import sha256 as digest_of
from trouper.protocol.blocks import BlockRef

FULL_COST = NODE_COST + BLOCK * TOKEN_COST
Tail = tuple[int, ...]


def new(blocks: int = 1000, digest: Digest = digest_of, block_size: int = BLOCK) -> PrefixTree:
    """With room for so many full blocks."""
    sizes = Sizes(
        block_size=block_size,
        token_bytes=TOKEN_COST,
        snapshot_bytes=SNAPSHOT_COST,
        capacity_bytes=blocks * FULL_COST,
    )
    return PrefixTree(NAMESPACE, sizes, digest)


def put(index: PrefixTree, tokens: Sequence[int], salt: str = "") -> list[Node]:
    """All of a text, as a row leaves it: its last block may be a part."""
    nodes: list[Node] = []
    parent = index.root(salt)
    for start in range(0, len(tokens), index.sizes.block_size):
        node = index.insert(parent, token_bytes(tokens[start : start + index.sizes.block_size]))
        assert node is not None
        nodes.append(node)
        parent = node
    return nodes


def known(
    index: PrefixTree, tokens: Sequence[int], salt: str = "", *, at_snapshot: bool = False
) -> int:
    return index.match(
        index.chain(token_bytes(tokens), salt), len(tokens), at_snapshot=at_snapshot
    ).tokens


def tell(
    index: PrefixTree, root: bytes, tokens: Sequence[int], *, snapshot: bool = False
) -> list[bytes]:
    """The disk has a text; the keys of its blocks."""
    keys = [root]
    for start in range(0, len(tokens), index.sizes.block_size):
        part = token_bytes(tokens[start : start + index.sizes.block_size])
        keys.append(digest_of(keys[-1] + part))
        index.on_disk(keys[-2], BlockRef(keys[-1], part, snapshot=snapshot))
    return keys[1:]


def root_key(salt: str) -> bytes:
    return digest_of(NAMESPACE + salt.encode())


# -- tokens --------------------------------------------------------------------------------------


TAILS = st.lists(st.integers(0, 2) | st.sampled_from([255, 256, 2**24, 2**31 - 1]), max_size=4).map(
    tuple
)


@given(st.integers(0, 300), st.sampled_from([0, 7, 2**31 - 1]), TAILS, TAILS)
@example(17, 7, (1,), (2,))
@example(127, 7, (256,), (255,))
@example(128, 7, (1,), (2,))
@example(170, 7, (256,), (255,))
@example(0, 0, (), (0,))
def test_common_is_how_many_tokens_two_texts_share(
    length: int, token: int, one: Tail, other: Tail
) -> None:
    """Whole tokens, not bytes; in texts that are short, long, equal, or the beginning of each
    other."""
    a, b = (token,) * length + one, (token,) * length + other
    shared = next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    assert (
        common(token_bytes(a), token_bytes(b)) == common(token_bytes(b), token_bytes(a)) == shared
    )


@given(TAILS, TAILS)
def test_bytes_of_tokens_are_sorted_as_tokens_are(one: Tail, other: Tail) -> None:
    assert (token_bytes(one) < token_bytes(other)) == (one < other)


# -- finding -------------------------------------------------------------------------------------


def clash(data: bytes) -> bytes:
    """Equal for blocks that begin with the same token after the same parent."""
    return sha256(data[:36]).digest()


def test_r2_equal_keys_of_other_tokens_are_a_miss() -> None:
    index = new(digest=clash)
    first, _ = put(index, [1, 2, 3, 4, 5])
    assert known(index, [1, 2, 3, 4, 5]) == 5
    assert known(index, [1, 9, 9, 9, 5]) == 1, "what is shared was compared, and may be used"
    assert index.match(index.chain(token_bytes([1, 9, 9, 9, 5])), 5).last is index.root()
    assert index.insert(index.root(), token_bytes([1, 9, 9, 9])) is None
    assert index.child(index.root(), token_bytes([1, 9, 9, 9])) is None
    index.on_disk(index.root().key, BlockRef(first.key, token_bytes([1, 9, 9, 9])))
    assert not first.on_disk
    assert index.collisions == 3
    assert known(index, [1, 2, 3, 4, 5]) == 5


def test_r2_equal_keys_after_other_parents_are_a_miss() -> None:
    index = new(
        digest=lambda data: sha256(data[32:]).digest() if len(data) > 32 else digest_of(data)
    )
    put(index, [1, 1, 1, 1, 5, 5, 5, 5])
    put(index, [2, 2, 2, 2])
    assert known(index, [1, 1, 1, 1, 5, 5, 5, 5]) == 8
    assert known(index, [2, 2, 2, 2, 5, 5, 5, 5]) == 4


def test_f6_a_hole_ends_the_match() -> None:
    """The middle is lost on disk; what follows it is useless until it is computed again."""
    text = list(range(14))
    index = new()
    keys = tell(index, index.root().key, text, snapshot=True)
    assert (known(index, text), known(index, text, at_snapshot=True)) == (14, 14)
    index.not_on_disk(keys[1])
    assert (known(index, text), known(index, text, at_snapshot=True)) == (4, 4)
    put(index, text[:8])
    assert (known(index, text), known(index, text, at_snapshot=True)) == (14, 14)


def test_a_hole_does_not_hide_its_neighbours() -> None:
    index = new()
    keys = tell(index, index.root().key, [1, 2, 3, 4, 5, 5, 5, 5])
    put(index, [1, 2, 9, 9])
    index.not_on_disk(keys[0])
    assert known(index, [1, 2, 3, 4]) == 2


def test_f15_a_prompt_that_is_shorter_than_what_is_cached() -> None:
    index = new()
    text = list(range(30))
    put(index, text)
    for length in range(31):
        assert known(index, text[:length]) == length


def test_a_departure_within_a_block_keeps_what_is_shared() -> None:
    index = new()
    put(index, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    put(index, [1, 2, 3, 4, 5, 6, 0, 0])
    assert known(index, [1, 2, 3, 4, 5, 6, 7, 0]) == 7
    assert known(index, [1, 2, 3, 4, 5, 6, 0, 1]) == 7
    assert known(index, [1, 2, 3, 4, 5, 6, 7, 8, 9, 11]) == 9, (
        "in the last block, too, which is not full"
    )
    assert known(index, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == 10
    assert known(index, [1, 2, 0]) == 2
    assert known(index, [0, 2, 3]) == 0


def test_a_snapshot_within_a_block_is_found_by_who_goes_on_like_others() -> None:
    """A system prompt ends in the middle of a block, and the first questions begin alike."""
    index = new()
    system = [1, 2, 3, 4, 5, 6]
    _, end = put(index, system)
    assert index.add_snapshot(end) is not None
    put(index, [*system, 7, 7, 7, 7, 7, 7])
    assert known(index, [*system, 7, 7, 7, 7, 8, 8], at_snapshot=True) == 6


def test_of_many_snapshots_the_longest_is_found() -> None:
    """However many others lie between."""
    index = new(block_size=16)
    for tokens in ([1, 2], [1, 2, 3], *([1, 2, 3, 4, n] for n in range(20)), [1, 2, 3, 4, 30, 30]):
        (node,) = put(index, tokens)
        if tokens != [1, 2, 3]:
            assert index.add_snapshot(node) is not None
    assert known(index, [1, 2, 3, 4, 25], at_snapshot=True) == 2
    assert known(index, [1, 2, 3, 4, 19, 5], at_snapshot=True) == 5


def test_salts_never_meet() -> None:
    index = new()
    put(index, [1, 2, 3, 4, 5], "tenant a")
    tell(index, root_key("tenant b"), [1, 2, 3, 4, 5])
    assert [
        known(index, [1, 2, 3, 4, 5], salt) for salt in ("", "tenant a", "tenant b", "tenant c")
    ] == [0, 5, 5, 0]


# -- the disk ------------------------------------------------------------------------------------


def test_a_long_text_of_another_tenant_is_found_when_the_tenant_comes() -> None:
    """Thousands of blocks that wait for a root: none is lost, and nothing recurs as deep."""
    index = new()
    text = [n % 50_000 for n in range(20_000)]
    tell(index, root_key("tenant"), text)
    assert not list(index.nodes())
    assert known(index, text, "tenant") == 20_000


def test_parts_of_a_block_may_be_told_one_after_another_before_its_parent_is_known() -> None:
    index = new()
    root, part = root_key("tenant"), token_bytes([1, 2, 3, 4])
    key = digest_of(root + part)
    index.on_disk(root, BlockRef(key, part))
    index.on_disk(root, BlockRef(key, part, payload=False, snapshot=True))
    assert [known(index, [1, 2, 3, 4], "tenant", at_snapshot=at) for at in (False, True)] == [4, 4]


def test_what_was_lost_before_it_was_known_is_not_believed() -> None:
    index = new()
    keys = tell(index, root_key("tenant"), list(range(12)))
    index.not_on_disk(keys[1])
    assert known(index, list(range(12)), "tenant") == 4


@pytest.mark.parametrize("tokens", [[], [1, 2, 3, 4, 5]])
def test_what_does_not_fit_is_not_believed(tokens: list[int]) -> None:
    index = new()
    root = index.root().key
    part = token_bytes(tokens)
    index.on_disk(root, BlockRef(digest_of(root + part), part))
    assert not list(index.nodes())


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1, 2, 3, 4]])
def test_a_key_of_other_tokens_is_not_believed(tokens: list[int]) -> None:
    index = new()
    root, part, key = index.root().key, token_bytes(tokens), digest_of(b"something else")
    index.on_disk(root, BlockRef(key, part, snapshot=True))
    index.on_disk(key, BlockRef(digest_of(key + part), part, snapshot=True))
    assert not list(index.nodes())
    assert known(index, tokens) == 0


# -- forgetting ----------------------------------------------------------------------------------


def test_r5_the_least_recently_used_goes_first_from_the_tail() -> None:
    index = new(blocks=6)
    old, new_ = put(index, [1] * 12), put(index, [2] * 12)
    index.eviction.touch(old)
    blocks = [[node.block for node in nodes] for nodes in (old, new_)]
    put(index, [3] * 4)
    assert index.eviction.freed() == (blocks[1][2],)
    put(index, [4] * 8)
    assert index.eviction.freed() == (blocks[1][1], blocks[1][0])
    index.eviction.evict(1)
    assert index.eviction.freed() == (blocks[0][2],)
    assert known(index, [1] * 12) == 8


def test_r5_what_is_in_use_stays_with_all_that_it_continues_wherever_it_is() -> None:
    index = new(blocks=3)
    first, second = put(index, [1] * 8)
    (gone,) = tell(index, second.key, [1] * 4)
    on_disk = index.known(gone)
    assert on_disk is not None
    index.eviction.pin(on_disk)
    for n in range(2, 8):
        put(index, [n] * 4)
    assert first.block is not None
    assert second.block is not None
    assert (
        index.insert(
            index.insert(index.root(), token_bytes([9] * 4)) or first, token_bytes([9] * 4)
        )
        is None
    )
    index.eviction.unpin(on_disk)
    assert index.eviction.evict(3 * FULL_COST) == 3 * FULL_COST


def test_r5_what_was_in_use_for_a_moment_can_go_later() -> None:
    """Its turn came while it could not go."""
    index = new(blocks=2)
    (node,), (other,) = put(index, [1] * 4), put(index, [2] * 4)
    assert index.add_snapshot(node) is not None
    assert node.block is not None
    assert other.block is None, "it was younger, but not in use"
    assert index.insert(node, token_bytes([1] * 4)) is None
    assert index.eviction.evict(2 * FULL_COST) == FULL_COST + SNAPSHOT_COST


# -- what it costs -------------------------------------------------------------------------------


@pytest.fixture
def hashed() -> list[int]:
    return []


@pytest.fixture
def counting(hashed: list[int]) -> Callable[[bytes], bytes]:
    def digest(data: bytes) -> bytes:
        hashed.append(len(data))
        return digest_of(data)

    return digest


def test_f7_each_token_is_hashed_once(hashed: list[int], counting: Digest) -> None:
    index = new(100_000, counting, 16)
    tokens = token_bytes(range(131_072))
    blocks = 131_072 // 16
    chain = index.chain(tokens)
    parent = chain.root
    assert len(hashed) == 1, "nobody has looked yet"
    for place in range(blocks):
        node = index.insert(parent, chain.part(16 * place, 16 * place + 16))
        assert node is not None
        parent = node
    hashed.clear()
    for limit in (131_071, 131_072, 70_000):
        assert index.match(chain, limit).tokens == limit
        assert index.match(chain, limit, at_snapshot=True).tokens == 0
    assert hashed == [32 + 64] * blocks


def test_f7_nothing_is_hashed_beyond_what_is_known(hashed: list[int], counting: Digest) -> None:
    index = new(digest=counting, block_size=16)
    chain = index.chain(token_bytes(range(131_072)))
    hashed.clear()
    assert index.match(chain, 131_071).tokens == 0
    assert len(hashed) == 1


def test_candidates_for_eviction_are_bounded_by_what_is_held() -> None:
    index = new()
    (node,) = put(index, [1] * 4)
    index.add_snapshot(node)
    for _ in range(1000):
        index.eviction.pin(node)
        index.eviction.unpin(node)
    assert len(index.eviction._heap) < 100


# -- the machine ---------------------------------------------------------------------------------


def play(
    index_class: type[PrefixTree], examples: int, phases: Collection[Phase] = tuple(Phase)
) -> None:
    machine = type("Machine", (IndexMachine,), {"index_class": index_class})
    how = settings(
        max_examples=examples,
        stateful_step_count=30,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine, settings=how)


def test_it_is_what_dictionaries_promise() -> None:
    play(PrefixTree, 250 if LONG else 100)


class IgnoresPins(Eviction):
    def _evictable(self, node: Node) -> bool:
        return node.block is not None and not node.resident_children


class EvictsUnderItsFeet(Eviction):
    def _evictable(self, node: Node) -> bool:
        return node.block is not None and not node.pins


class HasRoomForAll(Eviction):
    def make_room(self, nbytes: int, blocks: int = 0, *, keep: Node) -> bool:
        return True


class ForgetsToFree(Eviction):
    def drop_snapshot(self, node: Node) -> None:
        super().drop_snapshot(node)
        self._freed.pop()


class MostRecentlyUsedFirst(Eviction):
    def touch(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            node.last_used = -next(self._clock)
            self._offer(node)


class LocksNoAncestors(Eviction):
    """It promises bytes that it cannot free."""

    def _lock(self, node: Node | None) -> None:
        assert node is not None
        node.locks += 1
        if node.locks == 1:
            self.evictable_bytes -= self._bytes_of(node)

    def _unlock(self, node: Node | None) -> None:
        assert node is not None
        node.locks -= 1
        if not node.locks:
            self.evictable_bytes += self._bytes_of(node)


class BelievesInADiskThatIsGone(PrefixTree):
    def not_on_disk(self, key: bytes) -> None:
        pass


class KeepsEmptyNodes(PrefixTree):
    def _prune(self, node: Node) -> None:
        pass


class LinksNoPendingNodes(PrefixTree):
    def _link_pending(self, node: Node) -> None:
        pass


def with_eviction(eviction_class: type[Eviction]) -> type[PrefixTree]:
    class Tree(PrefixTree):
        def __init__(self, namespace: bytes, sizes: Sizes, digest: Digest = digest_of) -> None:
            super().__init__(namespace, sizes, digest)
            self.eviction = eviction_class(sizes, self._prune)

    return Tree


@pytest.mark.parametrize(
    "broken",
    [
        IgnoresPins,
        EvictsUnderItsFeet,
        HasRoomForAll,
        ForgetsToFree,
        BelievesInADiskThatIsGone,
        KeepsEmptyNodes,
        LinksNoPendingNodes,
        MostRecentlyUsedFirst,
        LocksNoAncestors,
    ],
)
def test_the_machine_notices(broken: type[PrefixTree | Eviction]) -> None:
    """Negative control."""
    tree_class = broken if issubclass(broken, PrefixTree) else with_eviction(broken)
    with pytest.raises(AssertionError):
        play(tree_class, 1000, [Phase.generate])


def test_what_can_never_fit_evicts_nothing() -> None:
    index = new(blocks=4)
    put(index, range(4 * BLOCK))
    held = index.eviction.bytes
    assert not index.eviction.make_room(index.sizes.capacity_bytes + 1, keep=index.root())
    assert (index.eviction.bytes, known(index, range(4 * BLOCK))) == (held, 4 * BLOCK)
    assert index.eviction.make_room(index.sizes.capacity_bytes, keep=index.root())
    assert index.eviction.bytes == 0
