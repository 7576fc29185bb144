"""The CUDA kernels of decode_attention.cuh, compiled for the CPU, where the threads of a block take
turns. Their arithmetic and indices are tested so without a GPU; on one, by
tests/device/test_decode_attention.py."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.engine import on_threads
from tests.family_configs import LONG
from trouper.engine.kv.decode_attention import mask_of
from trouper.engine.kv.decode_kernel import (
    FILE,
    HEAD_DIMS,
    MAX_PART,
    MAX_SUMS,
    WARPS,
    Heads,
    part_of,
)

SPLIT, LENGTHS = 64, np.array([0, 2, 65, 70], np.int32)
"""Number of tokens of each row before the pass: warps without a key, one that is not filled, and a
second split or turn."""
PROGRAM = """
#include "cuda_on_threads.h"
#include "%(source)s"
constexpr int D = %(dim)d, KEY_HEADS = %(key_heads)d, GROUP = %(group)d, PART = %(part)d, WARPS = %(warps)d, SPLIT = %(split)d;
constexpr bool SINKS = %(sinks)d;
using namespace decode_attention;
int main() {
    const int rows = %(rows)d, heads = KEY_HEADS * GROUP, width = %(width)d, count = %(splits)d, all = rows * heads * width;
    float* queries = read<float>(all * D);
    float* keys = read<float>(rows * KEY_HEADS * %(capacity)d * D);
    float* values = read<float>(rows * KEY_HEADS * %(capacity)d * D);
    float* sinks = read<float>(heads);
    int* lengths = read<int>(rows);
    float* splits = (float*)calloc(all * count * (D + 2), sizeof(float));
    float* out = (float*)calloc(all * D, sizeof(float));
    const int blocks = KEY_HEADS * ((GROUP * width + PART - 1) / PART);
    launch({blocks, rows, count}, WARPS * 32, [=] {
        attend<float, float, D, KEY_HEADS, GROUP, PART, WARPS, %(window)d, %(ring)d, SINKS, SPLIT>(
            queries, keys, values, lengths, 0.2f, sinks, SPLIT ? splits : out, width, %(capacity)d);
    });
    if (SPLIT) launch({all, 1, 1}, D, [=] { join<float, D, SINKS>(splits, sinks, out, heads, width, count); });
    fwrite(out, sizeof(float), all * D, stdout);
}
"""
MORE = (
    [(Heads(mx.float32, 64, 2, 3), 3, SPLIT), (Heads(mx.float32, 64, 2, 2, 40, 50), 1, 0)]
    if LONG
    else []
)
"""Of kinds that the others have, too: several tokens of a row, a ring. The first takes as long as
all others."""


@pytest.mark.parametrize(
    ("heads", "width", "split"),
    [
        (Heads(mx.float32, 64, 2, 1), 1, 0),
        (Heads(mx.float32, 128, 2, 8), 1, SPLIT),
        (Heads(mx.float32, 256, 1, 3), 1, 0),
        *MORE,
        (Heads(mx.float32, 64, 1, 5, sinks=True), 1, 0),
        (Heads(mx.float32, 64, 2, 2, sinks=True), 2, SPLIT),
        (Heads(mx.float32, 64, 1, 4, 66, 68, sinks=True), 1, SPLIT),
    ],
    ids=lambda value: str(value).replace("mlx.core.", ""),
)
@pytest.mark.long(but=("*dim=64*ring=68*", "*dim=256*", "*dim=64*-2-64"))
def test_the_kernels_are_attention_of_each_row_over_its_tokens(
    heads: Heads, width: int, split: int, tmp_path: Path
) -> None:
    rows, all_heads, capacity = len(LENGTHS), heads.key_heads * heads.group, heads.ring or 80
    names = {
        "dim": heads.dim,
        "key_heads": heads.key_heads,
        "group": heads.group,
        "part": part_of(heads.group * width, heads.dim),
        "warps": WARPS,
        "ring": heads.ring,
        "window": heads.window,
        "sinks": heads.sinks,
        "split": split,
        "rows": rows,
        "splits": -(-capacity // split) if split else 1,
        "capacity": capacity,
        "width": width,
        "source": FILE,
    }
    dice = np.random.default_rng(heads.dim + heads.group)
    queries = dice.standard_normal((rows, all_heads, width, heads.dim), np.float32)
    keys, values = (
        dice.standard_normal((rows, heads.key_heads, capacity, heads.dim), np.float32)
        for _ in range(2)
    )
    sinks, after = dice.standard_normal(all_heads, np.float32), LENGTHS + np.int32(width)
    given = b"".join(array.tobytes() for array in (queries, keys, values, sinks, after))
    got = np.frombuffer(on_threads.run(PROGRAM % names, given, tmp_path), np.float32).reshape(
        queries.shape
    )
    expected = mx.fast.scaled_dot_product_attention(
        *map(mx.array, (queries, keys, values)),
        scale=0.2,
        mask=mask_of(heads, LENGTHS, width, capacity)[:, None],
        sinks=mx.array(sinks) if heads.sinks else None,
    )
    np.testing.assert_allclose(got, np.array(expected), atol=1e-5)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_a_block_has_registers_for_its_queries(dim: int) -> None:
    for shared in range(1, 140):
        part = part_of(shared, dim)
        assert 1 <= part <= MAX_PART and part * dim // 32 <= MAX_SUMS
        assert -(-shared // part) * part - shared < part, "no block without a query"
