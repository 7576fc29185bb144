"""Cached blocks of KV and snapshots, between rows and disk."""

# Stored arrays are immutable, own their memory, and are evaluated at once: a lazy graph that refers
# to a slot buffer would make the next write copy the whole buffer.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.kv.kv_layout import ArrayShape, Layout
from trouper.engine.kv.row_copies import RowCopies
from trouper.engine.platform.eager_eval import finish_or_start
from trouper.protocol.blocks import Tensor, Tensors
from trouper.protocol.plans import BlockId, Load, Restore, RowId, Store
from trouper.protocol.ranks import joined, parted

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
    first = payload[0] if payload else None
    if first is None or (first.dtype, first.shape, first.nbytes) != ("U32", (2,), 8):
        raise ValueError("the payload does not begin with its kind and length")
    kind, tokens = np.frombuffer(first.data, "<u4").tolist()
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


# Maximum bytes of one copy out of slots, before the split into blocks.
RUN_BYTES = 2**26


class BlockStore:
    """Blocks and snapshots by id, on the engine's thread."""

    def __init__(self, rows: RowCopies) -> None:
        self._rows = rows
        self._stored: dict[BlockId, BlockArrays] = {}
        self.members = 0
        """`ranks.set_hash` of all stored ids."""

    @property
    def _layout(self) -> Layout:
        return self._rows.layout

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self._stored.values())

    def evict(self, blocks: Sequence[BlockId]) -> None:
        """Free blocks and snapshots. Raises KeyError for an unknown id."""
        for block in blocks:
            del self._stored[block]
        self.members = parted(self.members, blocks)

    def store(self, order: Store) -> None:
        """Copy blocks, and perhaps a snapshot, out of a live row."""
        at = order.start
        for blocks in batched(list(zip(order.blocks, order.sizes, strict=True)), self._bytes):
            at = self._store_run(order.row, at, blocks)
        if order.snapshot is not None:
            arrays = tuple(self._rows.snapshot(order.row, at))
            finish_or_start(arrays)
            self._keep(order.snapshot, BlockArrays(at, arrays, snapshot=True))
        snapshots = () if order.snapshot is None else (order.snapshot,)
        self.members = joined(self.members, (*order.blocks, *snapshots))

    def _store_run(self, row: RowId, start: int, blocks: Sequence[tuple[BlockId, int]]) -> int:
        # Split arrays (planes, tokens, dim) into blocks, by copies: a view would keep the whole run
        # alive.
        stop = start + sum(size for _, size in blocks)
        run = self._layout.pack(self._rows.read(row, start, stop))
        at, made = 0, list[mx.array]()
        for block, size in blocks:
            assert size > 0, "an empty block"
            arrays = tuple(mx.contiguous(array[:, at : at + size]) for array in run)
            self._keep(block, BlockArrays(size, arrays))
            made += arrays
            at += size
        finish_or_start(made)
        return stop

    def _bytes(self, block: tuple[BlockId, int]) -> int:
        return block[1] * self._layout.token_bytes

    def _keep(self, block: BlockId, stored: BlockArrays) -> None:
        assert block not in self._stored, "a block's id is used twice"
        self._stored[block] = stored

    def load(self, order: Load) -> None:
        """Add a block from disk. Raises ValueError if the bytes do not fit this model."""
        self._keep(order.block, stored_from(order.payload, self._layout))
        self.members = joined(self.members, [order.block])

    def restore(self, row: RowId, order: Restore) -> None:
        """Fill a new row: cached blocks, then tokens of a live row, then rings and states."""
        blocks = self._parts([self._stored[block] for block in order.blocks], order.tokens)
        self._write(row, blocks, order.tokens)
        if order.source is not None:
            assert self._rows.length(row) < order.tokens, (
                "nothing is left to copy from the live row"
            )
            self._rows.extend(row, order.source, order.tokens)
        assert self._rows.length(row) == order.tokens, (
            "blocks and source are not as long as the plan says"
        )
        self._restore_snapshot(row, order)
        self._rows.start(row)

    def _write(self, row: RowId, blocks: Sequence[BlockArrays], room: int) -> None:
        # Write each slot buffer once: a second write meanwhile would copy the buffer.
        tokens = sum(block.tokens for block in blocks)
        if blocks and self._rows.can_begin_with(row):
            planes = self._layout.planes
            self._rows.begin_with(
                row, [[block.arrays[at][part] for block in blocks] for at, part in planes], room + 1
            )
            self._rows.advance(row, tokens)
            return
        for slab in self._layout.slabs(tokens) if blocks else ():
            run = [
                mx.concatenate([block.arrays[index][planes] for block in blocks], 1)
                for index, planes in slab.planes
            ]
            self._rows.write(row, slab.layout.unpack(run), room, slab.leaves)
            self._rows.start(row, slab.leaves)
        self._rows.advance(row, tokens)

    def _parts(self, blocks: list[BlockArrays], tokens: int) -> list[BlockArrays]:
        # Trim the blocks to `tokens` tokens, the last one possibly in part.
        assert not any(block.snapshot for block in blocks), "a snapshot is no block"
        if (
            blocks
            and (last := tokens - sum(block.tokens for block in blocks[:-1])) < blocks[-1].tokens
        ):
            assert last > 0, "the last block has nothing to give"
            blocks[-1] = BlockArrays(last, tuple(array[:, :last] for array in blocks[-1].arrays))
        return blocks

    def _restore_snapshot(self, row: RowId, order: Restore) -> None:
        assert (order.snapshot is not None) == (self._layout.snapshot_bytes > 0), (
            "a snapshot too few, or too many"
        )
        if order.snapshot is not None:
            stored = self._stored[order.snapshot]
            assert stored.snapshot and stored.tokens == order.tokens, (
                "the snapshot is of another length"
            )
            self._rows.restore_snapshot(row, stored.arrays)

    def persist(self, blocks: Iterable[BlockId]) -> list[BlockArrays]:
        """References survive an eviction."""
        return [readable(self._stored[block]) for block in blocks]


T = TypeVar("T")


def batched(items: Sequence[T], size: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Group consecutive items into batches of at most RUN_BYTES, or of one item."""
    batch, batch_bytes = list[T](), 0
    for item in items:
        if batch and batch_bytes + size(item) > RUN_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += size(item)
    if batch:
        yield batch
