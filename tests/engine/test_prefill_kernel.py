"""The CUDA kernel of prefill_attention.cuh, compiled for the CPU, where the threads of a block take
turns. On a GPU: tests/device/test_prefill_attention.py."""

from __future__ import annotations

from pathlib import Path

import attrs
import mlx.core as mx
import numpy as np
import pytest

from tests.engine import on_threads
from trouper.engine.kv.decode_kernel import Heads
from trouper.engine.kv.prefill_attention import example
from trouper.engine.kv.prefill_kernel import FILE, TILES, PrefillCall
from trouper.engine.platform.cuda_kernels import INCLUDED

PROGRAM = """
#include "cuda_on_threads.h"
#include "%(included)s"
#include "%(source)s"
using T = bfloat16;
int main() {
    const int rows = %(rows)d, heads = %(heads)d, key_heads = %(key_heads)d, width = %(width)d, capacity = %(capacity)d;
    constexpr int D = %(dim)d, QUERIES = %(queries)d;
    const T* queries = read<T>(rows * heads * width * D);
    const T* keys = read<T>(%(slots)d * key_heads * capacity * D);
    const T* values = read<T>(%(slots)d * key_heads * capacity * D);
    const int* of_rows = read<int>(rows * 2);
    const T* sinks = read<T>(heads);
    T* out = (T*)calloc(rows * heads * width * D, sizeof(T));
    launch({(width + QUERIES - 1) / QUERIES, heads, rows}, QUERIES * 2, [=] {
        prefill_attention::attend<T, D, QUERIES, %(keys)d, %(window)d, %(ring)d, %(appended)d, %(sinks)d>(
            queries, keys, values, of_rows, %(scale)ff, sinks, out, heads, width, key_heads, capacity);
    });
    fwrite(out, sizeof(T), rows * heads * width * D, stdout);
}
"""


def run_on_threads(heads: Heads, call: PrefillCall, directory: Path) -> mx.array:
    rows, all_heads, width, dim = call.queries.shape
    tile, keys = TILES[dim]
    slots, key_heads, capacity, _ = call.keys.shape
    names = {
        "rows": rows,
        "heads": all_heads,
        "key_heads": key_heads,
        "width": width,
        "capacity": capacity,
        "slots": slots,
        "dim": dim,
        "queries": tile,
        "keys": keys,
        "window": heads.window,
        "ring": heads.ring,
        "appended": call.appended,
        "sinks": heads.sinks,
        "scale": call.scale,
        "included": INCLUDED,
        "source": FILE,
    }
    sinks = mx.zeros(all_heads, mx.bfloat16) if call.sinks is None else call.sinks
    arrays = [call.queries, call.keys, call.values, call.rows, sinks]
    sent = b"".join(np.array(array.view(mx.uint8)).tobytes() for array in arrays)
    done = on_threads.run(PROGRAM % names, sent, directory)
    got = mx.array(np.frombuffer(done, np.uint16)).view(mx.bfloat16)
    return got.reshape(rows, width, all_heads, dim).swapaxes(1, 2)


@pytest.mark.parametrize(
    ("heads", "width", "appended", "lengths"),
    [
        (Heads(mx.bfloat16, 64, 2, 2), 70, False, (0, 61)),
        (Heads(mx.bfloat16, 96, 1, 2, sinks=True), 9, False, (64, 130)),
        (Heads(mx.bfloat16, 128, 1, 1), 66, False, (0, 60)),
        (Heads(mx.bfloat16, 256, 1, 1), 33, False, (20,)),
        (Heads(mx.bfloat16, 64, 1, 1, 20, 30, sinks=True), 90, True, (3, 80)),
        (Heads(mx.bfloat16, 64, 1, 2, 20, 30), 11, False, (100, 7)),
    ],
    ids=lambda value: str(value).replace("mlx.core.", ""),
)
@pytest.mark.long(but=("*dim=64*ring=30*", "*dim=128*"))
def test_the_kernel_is_attention_up_to_each_querys_position(
    heads: Heads, width: int, appended: bool, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    call, expected = example(heads, np.array(lengths, np.int32), width, appended=appended)
    got = run_on_threads(heads, call, tmp_path)
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), np.array(expected), atol=0.02)


def test_rows_are_in_any_slots_and_what_they_have_not_written_is_not_read(tmp_path: Path) -> None:
    heads, lengths, width = Heads(mx.bfloat16, 64, 1, 1), np.array([5, 40], np.int32), 20
    call, expected = example(heads, lengths, width)
    slots = np.array([3, 1], np.int32)
    buffers = [mx.full((5, 1, 70, 64), float("nan"), mx.bfloat16) for _ in range(2)]
    for buffer, part in zip(buffers, (call.keys, call.values), strict=True):
        for row, (slot, length) in enumerate(zip(slots, lengths + width, strict=True)):
            buffer[int(slot), :, : int(length)] = part[row, :, : int(length)]
    rows = mx.array(np.stack([slots, lengths], axis=1))
    moved = attrs.evolve(call, keys=buffers[0], values=buffers[1], rows=rows)
    got = run_on_threads(heads, moved, tmp_path)
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), np.array(expected), atol=0.02)
