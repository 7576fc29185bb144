"""The content of one block of KV, or of one snapshot, as bytes: what travels between engine and disk."""

from __future__ import annotations

import attrs

TOKEN_BYTES = 4
"""Size of a token id: an int32."""


@attrs.frozen(eq=False)
class Tensor:
    """An array as raw bytes, row-major. `dtype` is the name that safetensors gives it: F32, F16, BF16, U32, U8."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    @property
    def nbytes(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.nbytes


Payload = tuple[Tensor, ...]
