"""Keys of blocks: a hash of each block's tokens and of its parent's key, as in vLLM's prefix
caching."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import numpy as np

from trouper.actors.scheduling.tree_node import Node
from trouper.protocol.blocks import TOKEN_BYTES

Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Tokens as big-endian int32: bytes compare as tokens do, so children can be sorted by them."""
    return np.fromiter(tokens, ">i4").tobytes()


class Chain:
    """The tokens of one text, and the keys of its full blocks. A key is computed once, at its first
    lookup (F7)."""

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
        """Key of full block number `index`."""
        keys, step = self._keys, self._step
        if index < len(keys):
            return keys[index]
        key = keys[-1] if keys else self.root.key
        for start in range(len(keys) * step, (index + 1) * step, step):
            key = self._digest(key + self.tokens[start : start + step])
            keys.append(key)
        return key
