"""Blocks of cached KV between engine, scheduler and disk."""

# A `BlockRef` names a block, `BlockData` has the bytes. A `Node` is the block in the prefix tree, a
# `BlockEntry` the block in a file. The engine has no keys and knows blocks by `BlockId`.

from __future__ import annotations

import attrs

# Bytes of a token id: int32.
TOKEN_BYTES = 4


@attrs.frozen(eq=False)
class Tensor:
    """An array as raw bytes, row-major. `dtype` as in safetensors: F32, F16, BF16, U32, U8."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    @property
    def nbytes(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.nbytes


Tensors = tuple[Tensor, ...]


@attrs.frozen
class BlockRef:
    """A block by its key, and the wanted parts: KV of the tokens, snapshot at the end."""

    key: bytes
    tokens: bytes
    """Tokens as int32 in the writer's byte order."""
    payload: bool = True
    snapshot: bool = False

    @property
    def payload_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES if self.payload else 0


@attrs.frozen(eq=False)
class BlockData:
    key: bytes
    tokens: bytes
    payload: Tensors
    """KV; () if only the snapshot is present, or if the model keeps nothing for each token."""
    snapshot: Tensors | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.payload, *(self.snapshot or ())))
