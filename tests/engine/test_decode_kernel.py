"""The CUDA kernel of decode_attention.py, compiled for the CPU: each thread of a block is a thread. Its arithmetic and indices are
tested so without a GPU; on one, by tests/device/test_decode_attention.py."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from trouper.engine.kv.decode_attention import HEAD_DIMS, MAX_PART, MAX_SUMS, SOURCE, WARPS, part_of

COMPILER = shutil.which("g++")
KEY_HEADS, CAPACITY, LENGTHS = 2, 80, (1, 3, 66)
"""Number of tokens of each row: warps without a key, one that is not filled, and a second turn of the first warp."""
PROGRAM = """
#include "cuda_on_threads.h"
#include <cstdio>
#include <cstdlib>
using T = float;
constexpr int D = %(dim)d, KEY_HEADS = %(key_heads)d, GROUP = %(group)d, PART = %(part)d, WARPS = %(warps)d;
static void kernel(const T* queries, const T* keys, const T* values, const int* lengths, const float* scale, const int* keys_shape, T* out) {
%(source)s
}
template <typename X> X* read(int size) {
    X* array = (X*)malloc(size * sizeof(X));
    if (fread(array, sizeof(X), size, stdin) != (size_t)size) exit(3);
    return array;
}
int main() {
    const int rows = %(rows)d, heads = KEY_HEADS * GROUP, shape[4] = {rows, KEY_HEADS, %(capacity)d, D};
    float* queries = read<float>(rows * heads * D);
    float* keys = read<float>(rows * KEY_HEADS * shape[2] * D);
    float* values = read<float>(rows * KEY_HEADS * shape[2] * D);
    int* lengths = read<int>(rows);
    const float scale[1] = {0.2f};
    float* out = (float*)calloc(rows * heads * D, sizeof(float));
    launch(heads / PART, rows, WARPS * 32, [=] { kernel(queries, keys, values, lengths, scale, shape, out); });
    fwrite(out, sizeof(float), rows * heads * D, stdout);
}
"""


@pytest.mark.parametrize(("group", "dim"), [(1, 64), (8, 128), (3, 256)])
def test_the_kernel_is_attention_of_each_row_over_its_tokens(group: int, dim: int, tmp_path: Path) -> None:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    values_of = {"dim": dim, "key_heads": KEY_HEADS, "group": group, "part": part_of(group, dim), "warps": WARPS,
                 "rows": len(LENGTHS), "capacity": CAPACITY, "source": SOURCE}  # fmt: skip
    source, program = tmp_path / "kernel.cpp", tmp_path / "kernel"
    source.write_text(PROGRAM % values_of)
    flags = ["-std=c++20", "-O1", "-pthread", "-I", str(Path(__file__).parent), "-o", str(program)]
    subprocess.run([COMPILER, *flags, str(source)], check=True)
    dice = np.random.default_rng(dim + group)
    queries = dice.standard_normal((len(LENGTHS), KEY_HEADS * group, dim), np.float32)
    keys, values = (dice.standard_normal((len(LENGTHS), KEY_HEADS, CAPACITY, dim), np.float32) for _ in range(2))
    lengths = np.array(LENGTHS, np.int32)
    given = b"".join(array.tobytes() for array in (queries, keys, values, lengths))
    done = subprocess.run([program], input=given, stdout=subprocess.PIPE, check=True)
    got = np.frombuffer(done.stdout, np.float32).reshape(queries.shape)
    for row, length in enumerate(LENGTHS):
        for head in range(KEY_HEADS * group):
            mine, theirs = (array[row, head // group, :length] for array in (keys, values))
            scores = np.exp(0.2 * (mine @ queries[row, head]).astype(np.float64))
            np.testing.assert_allclose(got[row, head], scores @ theirs / scores.sum(), atol=1e-5)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("group", range(1, 65))
def test_a_block_has_registers_for_its_heads(group: int, dim: int) -> None:
    part = part_of(group, dim)
    assert group % part == 0 and 1 <= part <= MAX_PART and part * dim // 32 <= MAX_SUMS
