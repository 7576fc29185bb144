"""A node of the prefix tree, and its key: a hash of the block's tokens and the parent's key, as in
vLLM's prefix caching."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

import attrs
import numpy as np

from trouper.protocol.blocks import TOKEN_BYTES
from trouper.protocol.plans import BlockId

_tokens = itemgetter(0)
# Bytes that are compared as a number, where NumPy takes two to five times as long. The beginning of
# a chat template is shorter.
SOON = 128 * TOKEN_BYTES


def common(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    a, b = a[:size], b[:size]
    if a == b:
        return size // TOKEN_BYTES
    if (begin := a[:SOON]) != b[:SOON]:
        differ = int.from_bytes(begin, "big") ^ int.from_bytes(b[:SOON], "big")
        return (len(begin) - (differ.bit_length() + 7) // 8) // TOKEN_BYTES
    return int(np.argmax(np.frombuffer(a, ">i4") != np.frombuffer(b, ">i4")))


@attrs.define(eq=False)
class Node:
    """One block's tokens, usable while the block is in memory or on disk."""

    key: bytes
    parent: Node | None
    tokens: bytes
    end: int
    block: BlockId | None = None
    snapshot: BlockId | None = None
    on_disk: bool = False
    snapshot_on_disk: bool = False
    queued: bool = False
    pins: int = 0
    locks: int = 0
    """Number of pins and of locked children."""
    resident_children: int = 0
    last_used: int = 0
    snapshot_last_used: int = 0
    _order: list[tuple[bytes, Node]] = attrs.field(factory=list)

    # Siblings have distinct tokens, and entries of a heap distinct stamps.
    def __lt__(self, other: Node) -> bool:
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
        """Whether the node or a descendant is in memory or pinned, which keeps the parent."""
        return self.block is not None or self.pins > 0 or self.resident_children > 0

    @property
    def has_snapshot(self) -> bool:
        return self.snapshot is not None or self.snapshot_on_disk

    @property
    def is_leaf(self) -> bool:
        return not self._order

    @property
    def children(self) -> Iterator[Node]:
        return (node for _, node in self._order)

    def attach(self, child: Node) -> None:
        insort(self._order, (child.tokens, child))

    def detach(self, child: Node) -> None:
        del self._order[bisect_left(self._order, (child.tokens, child))]

    def nearest(self, tokens: bytes) -> tuple[int, Node | None]:
        """Length in tokens of the longest common prefix with a usable child, and that child."""
        # The common prefix shrinks with the distance from the insertion point: the first usable
        # child on either side is the best of that side.
        index = bisect_left(self._order, (tokens,))
        sides = range(index - 1, -1, -1), range(index, len(self._order))
        near = [
            next((node for n in side if (node := self._order[n][1]).usable), None) for side in sides
        ]
        found = [(common(tokens, node.tokens), node) for node in near if node is not None]
        return max(((n, node) for n, node in found if n), default=(0, None))

    def longest_with_snapshot(self, tokens: bytes) -> Node | None:
        # All prefixes of `tokens` are prefixes of the common part with the last child that is not
        # greater.
        index = bisect_right(self._order, tokens, key=_tokens)
        while index:
            child_tokens, node = self._order[index - 1]
            shared = common(tokens, child_tokens) * TOKEN_BYTES
            if shared == len(child_tokens):
                if node.usable and node.has_snapshot:
                    return node
                shared -= TOKEN_BYTES
            tokens = tokens[:shared]
            index = bisect_right(self._order, tokens, key=_tokens)
        return None


Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Tokens as big-endian int32, whose bytes sort as the tokens do."""
    return np.fromiter(tokens, ">i4").tobytes()


class Chain:
    """A text's tokens, and the keys of full blocks, each computed once (F7)."""

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

    def starts_with(self, part: bytes) -> bool:
        return self.tokens.startswith(part)

    def key(self, index: int) -> bytes:
        keys, step = self._keys, self._step
        if index < len(keys):
            return keys[index]
        key = keys[-1] if keys else self.root.key
        for start in range(len(keys) * step, (index + 1) * step, step):
            key = self._digest(key + self.tokens[start : start + step])
            keys.append(key)
        return key
