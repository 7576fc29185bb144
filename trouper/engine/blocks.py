"""What stays of rows: blocks of KV and snapshots, stored, restored, forgotten, given to the disk and taken from it.

Stored arrays are immutable and own their memory. They are computed at once: a graph that still refers
to a slot buffer would make that buffer's next write a copy of all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from trouper.engine.computing import finish_or_start
from trouper.engine.layout import Layout
from trouper.engine.payloads import PendingPayload, Stored, pending, stored_from
from trouper.engine.rows import SlotRows
from trouper.protocol.plans import BlockId, Load, Restore, RowId, Store


class BlockStore:
    """Blocks and snapshots by their ids. Lives on the engine's thread, beside the rows."""

    def __init__(self, rows: SlotRows) -> None:
        self._rows = rows
        self._stored: dict[BlockId, Stored] = {}

    @property
    def _layout(self) -> Layout:
        return self._rows.layout

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self._stored.values())

    def evict(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            del self._stored[block]

    def store(self, order: Store) -> None:
        """Copy out of a live row."""
        stop = order.start + sum(order.sizes)
        if order.sizes:
            run = self._layout.pack(self._rows.read(order.row, order.start, stop))
            self._keep_blocks(order, run)
        if order.snapshot is not None:
            assert stop == self._rows.length(order.row), "a snapshot is of now, not of another length"
            arrays = tuple(self._rows.snapshot(order.row))
            finish_or_start(arrays)
            self._keep(order.snapshot, Stored(stop, arrays, snapshot=True))

    def _keep_blocks(self, order: Store, run: Sequence[mx.array]) -> None:
        """Cut (planes, all tokens, dim) into blocks. `contiguous` copies, since a view would keep the whole run."""
        at, made = 0, list[mx.array]()
        for block, size in zip(order.blocks, order.sizes, strict=True):
            assert size > 0, "an empty block"
            arrays = tuple(mx.contiguous(array[:, at : at + size]) for array in run)
            self._keep(block, Stored(size, arrays))
            made += arrays
            at += size
        finish_or_start(made)

    def _keep(self, block: BlockId, stored: Stored) -> None:
        assert block not in self._stored, "a block's id is used twice"
        self._stored[block] = stored

    def load(self, order: Load) -> None:
        """Raises ValueError where the bytes do not fit this model."""
        self._keep(order.block, stored_from(order.payload, self._layout))

    def restore(self, row: RowId, order: Restore) -> None:
        """Into a row that was just opened: blocks, then what a live row has beyond them, then rings and states."""
        blocks = [self._stored[block] for block in order.blocks]
        held = min(sum(block.tokens for block in blocks), order.tokens)
        if blocks:
            self._rows.write(row, self._layout.unpack(self._run(blocks, held)), held)
        if order.source is not None:
            assert held < order.tokens, "nothing is left to copy from the live row"
            self._rows.extend(row, order.source, order.tokens)
        assert self._rows.length(row) == order.tokens, "blocks and source are not as long as the plan says"
        self._restore_snapshot(row, order)
        self._rows.start()

    def _run(self, blocks: Sequence[Stored], tokens: int) -> list[mx.array]:
        """Blocks side by side: (planes, tokens, dim) of each of their arrays; the last block perhaps in part."""
        assert not any(block.snapshot for block in blocks), "a snapshot is no block"
        last = tokens - sum(block.tokens for block in blocks[:-1])
        assert 0 < last <= blocks[-1].tokens, "the last block has nothing to give"
        return [
            mx.concatenate([*(block.arrays[place] for block in blocks[:-1]), array[:, :last]], 1)
            for place, array in enumerate(blocks[-1].arrays)
        ]

    def _restore_snapshot(self, row: RowId, order: Restore) -> None:
        assert (order.snapshot is not None) == (self._layout.snapshot_bytes > 0), "a snapshot too few, or too many"
        if order.snapshot is not None:
            stored = self._stored[order.snapshot]
            assert stored.snapshot and stored.tokens == order.tokens, "the snapshot is of another length"
            self._rows.restore_snapshot(row, stored.arrays)

    def persist(self, blocks: Iterable[BlockId]) -> list[PendingPayload]:
        """References, whatever is evicted before they are read."""
        return [pending(self._stored[block]) for block in blocks]
