"""Serialization of blocks and snapshots. A block's first tensor is a header: U32 (kind, tokens)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.kv.kv_layout import ArrayShape, Layout
from trouper.protocol.blocks import Tensor, Tensors

BLOCK, SNAPSHOT = 0, 1
DTYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "I64": mx.int64,
    "U8": mx.uint8,
}
# NumPy has no bfloat16, whose bits are viewed as uint16, otherwise unused in blocks.
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {mx.uint16: "BF16"}


@attrs.frozen(eq=False)
class BlockArrays:
    """Immutable arrays of a block of `tokens` tokens, or of a snapshot after `tokens` tokens."""

    tokens: int
    arrays: tuple[mx.array, ...]
    snapshot: bool = False

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def read(self) -> Tensors:
        """The bytes of `readable` arrays, without a copy. Waits for the device."""
        mx.eval(self.arrays)
        header = np.array([SNAPSHOT if self.snapshot else BLOCK, self.tokens], np.uint32)
        tensors = [
            Tensor(NAMES[array.dtype], tuple(array.shape), _bytes(array)) for array in self.arrays
        ]
        return (Tensor("U32", (2,), header.tobytes()), *tensors)


def readable(stored: BlockArrays) -> BlockArrays:
    """The arrays in dtypes of NumPy, which the device computes before the next step."""
    arrays = tuple(
        array.view(mx.uint16) if array.dtype == mx.bfloat16 else array for array in stored.arrays
    )
    mx.async_eval(arrays)
    return attrs.evolve(stored, arrays=arrays)


def _bytes(array: mx.array) -> memoryview | bytes:
    # A view that any thread may read, and that keeps the array alive.
    return np.array(array, copy=False).reshape(-1).view(np.uint8).data if array.size else b""


def stored_from(payload: Tensors, layout: Layout) -> BlockArrays:
    """Decode a payload. Raises ValueError if the bytes are no block or snapshot of this layout."""
    if (
        not payload
        or payload[0].dtype != "U32"
        or payload[0].shape != (2,)
        or payload[0].nbytes != 8
    ):
        raise ValueError("the payload does not begin with its kind and length")
    kind, tokens = np.frombuffer(payload[0].data, "<u4").tolist()
    if kind not in (BLOCK, SNAPSHOT) or tokens < 1:
        raise ValueError(f"the payload says kind {kind} and {tokens} tokens")
    shapes = layout.snapshot(tokens) if kind == SNAPSHOT else layout.block(tokens)
    return BlockArrays(tokens, _arrays(payload[1:], shapes), kind == SNAPSHOT)


def _arrays(tensors: Sequence[Tensor], shapes: Sequence[ArrayShape]) -> tuple[mx.array, ...]:
    if len(tensors) != len(shapes):
        raise ValueError(
            f"the payload has {len(tensors)} arrays where this model has {len(shapes)}"
        )
    return tuple(_array(tensor, shape) for tensor, shape in zip(tensors, shapes, strict=True))


def _array(tensor: Tensor, shape: ArrayShape) -> mx.array:
    dtype = NAMES.get(shape.dtype)
    if tensor.dtype != dtype or tensor.shape != shape.dims or tensor.nbytes != shape.nbytes:
        found = f"{tensor.dtype} {tensor.shape} in {tensor.nbytes} bytes"
        raise ValueError(f"the payload has {found} where this model has {dtype} {shape.dims}")
    kind = np.dtype("<u2") if dtype == "BF16" else np.dtype(NUMPY[dtype])
    array = mx.array(np.frombuffer(tensor.data, kind).reshape(shape.dims))
    return array.view(mx.bfloat16) if dtype == "BF16" else array


NUMPY = {"F32": "<f4", "F16": "<f2", "U32": "<u4", "I32": "<i4", "I64": "<i8", "U8": "u1"}
