"""The stages of a restore from SSD, one by one and without a server: files to verified blocks, blocks to the engine, blocks to a row."""

from __future__ import annotations

from pathlib import Path

import trouper.engine  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx

from trouper.engine.kv.block_store import BlockStore
from trouper.engine.kv.pass_shapes import of_device
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.rows import rows_for
from trouper.engine.loading.model_loading import load
from trouper.protocol.blocks import BlockData, BlockRef
from trouper.protocol.plans import BlockId, Load, Restore, RowId
from trouper.protocol.settings import Settings
from trouper.storage.block_locations import BlockLocations
from trouper.storage.runs import RunStore

ROW = RowId(0)


class Restoring:
    """The longest text of a cache directory, which must have one namespace, and an engine that it can be restored into."""

    def __init__(self, model: Path, directory: Path) -> None:
        namespace = next(path.name for path in directory.iterdir() if path.is_dir())
        self._store = RunStore(directory, namespace)
        self._store.refresh()
        self._groups = BlockLocations(self._store.runs).by_run(self._longest())
        self._rows, _ = rows_for(load(Settings(model=str(model)), lambda _: None).model, PLAIN, 0, of_device(), None)
        self._blocks = BlockStore(self._rows)
        self._data: list[BlockData] = []
        self.read()
        self.nbytes = sum(block.nbytes for block in self._data)
        self.tokens = sum(len(block.tokens) // 4 for block in self._data)

    def _longest(self) -> list[BlockRef]:
        known = {
            entry.key: (parent, entry)
            for run in self._store.runs
            for parent, entry in zip((run.parent, *(piece.key for piece in run.pieces)), run.pieces, strict=False)
        }
        depths: dict[bytes, int] = {}
        for key in known:
            path = [key]
            while path[-1] in known and path[-1] not in depths:
                path.append(known[path[-1]][0])
            for node in reversed(path[:-1]):
                depths[node] = depths.get(known[node][0], 0) + len(known[node][1].tokens)
        key, chain = max(depths, key=lambda one: depths[one]), list[BlockRef]()
        while key in known:
            key, entry = known[key]
            chain.append(BlockRef(entry.key, entry.tokens))
        return chain[::-1]

    def read(self) -> None:
        self._data = [block for name, refs in self._groups for block in self._store.read(name, refs)]

    def read_and_evict(self) -> None:
        self.read()
        if self._blocks.members:
            self._blocks.evict(list(map(BlockId, range(len(self._data)))))

    def load(self) -> None:
        for index, block in enumerate(self._data):
            self._blocks.load(Load(BlockId(index), block.payload, 0, index))
        mx.synchronize()

    def fill_and_drop(self) -> None:
        if not self._blocks.members:
            self.load()
        if self._rows.lengths():
            self._rows.drop([ROW])
        mx.clear_cache()

    def restore(self) -> None:
        self._rows.open(ROW)
        self._blocks.restore(ROW, Restore(self.tokens, tuple(map(BlockId, range(len(self._data))))))
        mx.eval(self._rows.state() if hasattr(self._rows, "state") else [])
        mx.synchronize()
