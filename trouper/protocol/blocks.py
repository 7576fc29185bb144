"""Blocks of cached KV between engine, scheduler and disk: which block, and its bytes.

A `BlockRef` says which block, and `BlockData` is its bytes. A block's place in the prefix tree is a
`Node`, its place in a file a `BlockEntry`. The engine knows blocks by the numbers of plans
(`BlockId`), since it has no keys.
"""

from __future__ import annotations

import attrs

TOKEN_BYTES = 4
"""Size of a token id: an int32."""


@attrs.frozen(eq=False)
class Tensor:
    """An array as raw bytes, row-major. `dtype` is the name that safetensors gives it: F32, F16,
    BF16, U32, U8."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    @property
    def nbytes(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.nbytes


Tensors = tuple[Tensor, ...]
"""The content of one block of KV, or of one snapshot."""


@attrs.frozen
class BlockRef:
    """Which block, by its key in the prefix tree, and which of its parts: the KV of its tokens, the
    snapshot at its end."""

    key: bytes
    tokens: bytes
    """Tokens as int32, in the byte order of their writer: here they are only compared and
    counted."""
    payload: bool = True
    snapshot: bool = False

    @property
    def payload_tokens(self) -> int:
        """Number of tokens whose KV is meant."""
        return len(self.tokens) // TOKEN_BYTES if self.payload else 0


@attrs.frozen(eq=False)
class BlockData:
    """The bytes of a block: the KV of its tokens, the snapshot at its end, or both."""

    key: bytes
    tokens: bytes
    """Tokens as in `BlockRef`."""
    payload: Tensors
    """Bytes of the KV; () if only the snapshot is present, or if the model keeps nothing for each
    token."""
    snapshot: Tensors | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.payload, *(self.snapshot or ())))
