"""The stages of a restore from SSD, one by one and without a server: files to verified blocks,
blocks to the engine, blocks to a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx

from tests.families import build
from trouper.actors.scheduling.disk_tier import RUN_BYTES
from trouper.actors.scheduling.tree_node import sha256
from trouper.engine.kv.block_store import BlockArrays, BlockStore, readable
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.rows import rows_for
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.pass_shapes import of_device
from trouper.protocol.blocks import BlockData, BlockRef
from trouper.protocol.plans import BlockId, Load, Restore, RowId
from trouper.storage.runs import RunStore
from trouper.storage.stored_blocks import BlockLocations

ROW, BLOCK_TOKENS = RowId(0), 64


class Restoring:
    """A text of `nbytes` of KV in an empty cache directory, and an engine with a model of this
    config to restore it into."""

    def __init__(self, config: dict[str, Any], directory: Path, nbytes: int) -> None:
        rows, _ = rows_for(build(config["model_type"], config=config), PLAIN, 0, of_device(), None)
        assert isinstance(rows, SlotRows), "nothing of this model is cached"
        self._rows = rows
        self._blocks = BlockStore(self._rows.copies)
        self._store = RunStore(directory, "fa4e" * 16)
        self._data: list[BlockData] = []
        block_bytes = BLOCK_TOKENS * self._rows.copies.layout.token_bytes
        self.block_bytes, self.num_blocks = block_bytes, max(1, nbytes // block_bytes)
        self.nbytes = self.num_blocks * block_bytes
        self._write(max(1, RUN_BYTES // block_bytes))
        refs = [BlockRef(piece.key, piece.tokens) for piece in self._pieces()]
        self._groups = BlockLocations(self._store.runs).by_run(refs)
        self._ids = tuple(map(BlockId, range(self.num_blocks)))

    def _pieces(self) -> Iterator[BlockData]:
        arrays = tuple(
            mx.random.normal(shape.dims).astype(shape.dtype)
            for shape in self._rows.copies.layout.block(BLOCK_TOKENS)
        )
        payload = readable(BlockArrays(BLOCK_TOKENS, arrays)).read()
        key = bytes(32)
        for number in range(self.num_blocks):
            tokens = np.full(BLOCK_TOKENS, number, ">i4").tobytes()
            key = sha256(key + tokens)
            yield BlockData(key, tokens, payload)

    def _write(self, blocks_a_run: int) -> None:
        parent, pieces = bytes(32), self._pieces()
        while run := list(islice(pieces, blocks_a_run)):
            self._store.put(self._store.seal(parent, run))
            parent = run[-1].key

    def stream(self) -> None:
        """Files to the engine's arrays as the server does it: a run is read while the one before it
        is loaded."""
        with ThreadPoolExecutor(1) as reader:
            at, ahead = (
                0,
                deque(reader.submit(self._store.read, *group) for group in self._groups[:1]),
            )
            for group in (*self._groups[1:], None):
                blocks = ahead.popleft().result()
                if group is not None:
                    ahead.append(reader.submit(self._store.read, *group))
                for block in blocks:
                    self._blocks.load(Load(self._ids[at], block.payload, 0, at))
                    at += 1
        mx.synchronize()

    # -- stages ----------------------------------------------------------------------------------

    def read(self) -> None:
        """Files to verified blocks."""
        self._data = []  # A step's data is freed before the next is read.
        self._data = [
            block for name, refs in self._groups for block in self._store.read(name, refs)
        ]

    def evict(self) -> None:
        if self._blocks.members:
            self._blocks.evict(self._ids)
        mx.clear_cache()

    def load(self) -> None:
        """Blocks to the engine's arrays."""
        for index, block in enumerate(self._data):
            self._blocks.load(Load(self._ids[index], block.payload, 0, index))
        mx.synchronize()

    def drop(self) -> None:
        if self._rows.lengths():
            self._rows.drop([ROW])
        mx.clear_cache()

    def restore(self) -> None:
        """The engine's blocks to a row."""
        self._rows.open(ROW)
        self._blocks.restore(ROW, Restore(self.num_blocks * BLOCK_TOKENS, self._ids))
        mx.synchronize()
