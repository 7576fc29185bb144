"""The CUDA kernel of prefill_attention.cuh, compiled for the CPU, where the threads of a block take
turns. On a GPU: tests/device/test_prefill_attention.py."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.engine import on_threads
from trouper.engine.kv.decode_attention import mask_of
from trouper.engine.kv.decode_kernel import Heads
from trouper.engine.kv.prefill_kernel import FILE, TILES
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
    const int* places = read<int>(rows * 2);
    T* out = (T*)calloc(rows * heads * width * D, sizeof(T));
    launch({(width + QUERIES - 1) / QUERIES, heads, rows}, QUERIES * 2, [=] {
        prefill_attention::attend<T, D, QUERIES, %(keys)d>(queries, keys, values, places, 0.2f, out, heads, width, key_heads, capacity);
    });
    fwrite(out, sizeof(T), rows * heads * width * D, stdout);
}
"""


@pytest.mark.parametrize(
    ("heads", "width", "slots"),
    [
        (Heads(mx.bfloat16, 64, 2, 2), 70, {1: 0, 3: 61}),
        (Heads(mx.bfloat16, 128, 1, 2), 9, {0: 64, 2: 130}),
        (Heads(mx.bfloat16, 256, 1, 1), 33, {1: 20}),
    ],
    ids=lambda value: str(getattr(value, "dim", value)),
)
@pytest.mark.long(but=("64-*",))
def test_the_kernel_is_attention_up_to_each_querys_position(
    heads: Heads, width: int, slots: dict[int, int], tmp_path: Path
) -> None:
    """`slots`: tokens before the pass of each row, by slot. Behind its tokens are no numbers."""
    dim, key_heads, all_heads = heads.dim, heads.key_heads, heads.key_heads * heads.group
    tile, keys_of_tile = TILES[dim]
    lengths = np.array([*slots.values()], np.int32)
    capacity, number = int(lengths.max()) + width + 3, max(slots) + 2
    names = {
        "rows": len(slots),
        "heads": all_heads,
        "key_heads": key_heads,
        "width": width,
        "capacity": capacity,
        "slots": number,
        "dim": dim,
        "queries": tile,
        "keys": keys_of_tile,
        "included": INCLUDED,
        "source": FILE,
    }
    sizes = [(len(slots), all_heads, width, dim), *[(number, key_heads, capacity, dim)] * 2]
    queries, keys, values = (
        mx.random.normal(size, key=key).astype(mx.bfloat16)
        for size, key in zip(sizes, mx.random.split(mx.random.key(dim), 3), strict=True)
    )
    used = np.zeros((number, 1, capacity, 1), bool)
    for slot, length in slots.items():
        used[slot, :, : length + width] = True
    keys, values = (
        mx.where(mx.array(used), part, mx.array(float("nan"), part.dtype))
        for part in (keys, values)
    )
    places = np.stack([np.array([*slots], np.int32), lengths], axis=1)
    read = [
        *(np.array(part.view(mx.uint8)).tobytes() for part in (queries, keys, values)),
        places.tobytes(),
    ]
    done = on_threads.run(PROGRAM % names, b"".join(read), tmp_path)
    got = mx.array(np.frombuffer(done, np.uint16)).view(mx.bfloat16).astype(mx.float32)
    mask = mask_of(heads, lengths, width, capacity)
    of_rows = [mx.nan_to_num(part[mx.array([*slots])]) for part in (keys, values)]
    expected = mx.fast.scaled_dot_product_attention(
        queries.astype(mx.float32),
        *(part.astype(mx.float32) for part in of_rows),
        scale=0.2,
        mask=mask[:, None],
    )
    np.testing.assert_allclose(
        np.array(got.reshape(len(slots), width, all_heads, dim).swapaxes(1, 2)),
        np.array(expected),
        atol=0.02,
    )
