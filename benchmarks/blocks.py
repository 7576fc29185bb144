"""Blocks of KV: what storing and restoring a prefix costs, by layout and block size. `python -m
benchmarks.blocks`.

In copies of the same bytes by NumPy, into memory that was touched before. SmolLM2's shape in
float32: 46 KB a token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx
import numpy as np

from trouper.engine.kv.block_store import BlockStore
from trouper.engine.kv.model_caches import by_caches
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.loading.model_loading import load
from trouper.protocol.plans import BlockId, Restore, RowId, Store
from trouper.protocol.settings import Settings

LAYERS, HEADS, DIM = 30, 3, 64
SLOTS, CAPACITY = 4, 4352
REPEATS = 7
Buffers = list[mx.array]
"""Keys and values of each layer: (slots, heads, tokens, dim)."""


class Tokens:
    """A block is (tokens, features): every layer, side and head of one token side by side."""

    name = "(tokens, features)"

    def store(self, buffers: Buffers, size: int, tokens: int) -> list[mx.array]:
        parts = [
            buffer[0, :, :tokens].transpose(1, 0, 2).reshape(tokens, HEADS * DIM)
            for buffer in buffers
        ]
        run = mx.concatenate(parts, 1)
        return [mx.contiguous(run[at : at + size]) for at in range(0, tokens, size)]

    def restore(self, blocks: list[mx.array], buffers: Buffers, tokens: int) -> None:
        parts = (
            mx.concatenate(blocks).reshape(tokens, len(buffers), HEADS, DIM).transpose(1, 2, 0, 3)
        )
        for place, buffer in enumerate(buffers):
            buffer[1, :, :tokens] = parts[place]


class Planes:
    """A block is (layers * sides * heads, tokens, dim): a head's tokens side by side, as in the
    slots."""

    name = "(planes, tokens, dim)"

    def store(self, buffers: Buffers, size: int, tokens: int) -> list[mx.array]:
        run = mx.concatenate([buffer[0, :, :tokens] for buffer in buffers])
        return [mx.contiguous(run[:, at : at + size]) for at in range(0, tokens, size)]

    def restore(self, blocks: list[mx.array], buffers: Buffers, tokens: int) -> None:
        run = mx.concatenate(blocks, 1)
        for place, buffer in enumerate(buffers):
            buffer[1, :, :tokens] = run[place * HEADS : (place + 1) * HEADS]


class PlanesAtOnce(Planes):
    """... stored without the detour over one array of everything."""

    name = "(planes, tokens, dim), each block on its own"

    def store(self, buffers: Buffers, size: int, tokens: int) -> list[mx.array]:
        return [
            mx.concatenate([buffer[0, :, at : at + size] for buffer in buffers])
            for at in range(0, tokens, size)
        ]


class Layers(Planes):
    """A block is an array for each layer and side."""

    name = "(heads, tokens, dim) a layer and side"

    def store(self, buffers: Buffers, size: int, tokens: int) -> list[mx.array]:
        return [
            mx.contiguous(buffer[0, :, at : at + size])
            for buffer in buffers
            for at in range(0, tokens, size)
        ]

    def restore(self, blocks: list[mx.array], buffers: Buffers, tokens: int) -> None:
        each = len(blocks) // len(buffers)
        for place, buffer in enumerate(buffers):
            buffer[1, :, :tokens] = mx.concatenate(blocks[place * each : (place + 1) * each], 1)


LAYOUTS: Sequence[Tokens | Planes] = (Tokens(), Planes(), PlanesAtOnce(), Layers())


def seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def copies(tokens: int) -> tuple[float, float]:
    """Seconds of one copy of the bytes, into memory touched before and into fresh memory."""
    source = np.ones(tokens * LAYERS * 2 * HEADS * DIM, np.float32)
    target = np.ones_like(source)
    return seconds(lambda: np.copyto(target, source)), seconds(source.copy)


def measure(
    layout: Tokens | Planes, size: int, tokens: int, buffers: Buffers
) -> tuple[float, float]:
    blocks: list[mx.array] = []

    def store() -> None:
        blocks[:] = layout.store(buffers, size, tokens)
        mx.eval(blocks)

    def restore() -> None:
        layout.restore(blocks, buffers, tokens)
        mx.eval(buffers)

    return seconds(store), seconds(restore)


def through_the_engine(size: int, tokens: int) -> tuple[float, float]:
    """The same by the engine's own parts, with the embedded model: slots found, lengths checked,
    buffers in use."""
    model = load(Settings(), lambda _: None).model
    rows = SlotRows(model, by_caches(model), PLAIN)
    blocks = BlockStore(rows.copies)
    for row in range(SLOTS):
        rows.open(RowId(row))
    parts = [
        mx.random.normal((*shape.dims[:1], tokens, DIM)) for shape in rows.copies.layout.sliceable
    ]
    rows.write(RowId(0), parts, tokens)
    rows.advance(RowId(0), tokens)
    rows.start()
    mx.synchronize()
    full, known, stored, restored = tokens // size, 0, [], []
    for _ in range(REPEATS):
        ids = tuple(map(BlockId, range(known, known + full)))
        stored.append(once(lambda: blocks.store(Store(RowId(0), 0, (size,) * full, ids))))  # noqa: B023
        rows.drop([RowId(1)])
        rows.open(RowId(1))
        restored.append(once(lambda: blocks.restore(RowId(1), Restore(tokens, ids))))  # noqa: B023
        blocks.evict(ids)
        known += full
    return statistics.median(stored), statistics.median(restored)


def once(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    mx.synchronize()
    return time.perf_counter() - began


def main() -> None:
    mx.random.seed(0)
    buffers = [mx.random.normal((SLOTS, HEADS, CAPACITY, DIM)) for _ in range(2 * LAYERS)]
    mx.eval(buffers)
    for tokens in (512, 4096):
        touched, fresh = copies(tokens)
        print(
            f"\n{tokens} tokens: one copy {touched * 1000:.1f} ms, into fresh memory "
            f"{fresh / touched:.2f} copies"
        )
        for layout in LAYOUTS:
            for size in (16, 32, 64, 128):
                stored, restored = measure(layout, size, tokens, buffers)
                print(
                    f"{layout.name:>46}, blocks of {size:3}: "
                    f"store {stored / touched:5.2f} copies, restore {restored / touched:5.2f}"
                )
        for size in (16, 64):
            stored, restored = through_the_engine(size, tokens)
            print(
                f"{'through the engine':>46}, blocks of {size:3}: "
                f"store {stored / touched:5.2f} copies, restore {restored / touched:5.2f}"
            )


if __name__ == "__main__":
    main()
