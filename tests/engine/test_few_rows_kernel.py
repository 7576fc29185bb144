"""The CUDA kernel of few_rows.cuh, compiled for the CPU, where the threads of a block take turns,
and the tensor cores' product is emulated. Its indices are tested so without a GPU; on one, by
tests/device/test_few_rows.py."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.engine import on_threads
from trouper.engine.platform.cuda_kernels import INCLUDED
from trouper.engine.products import few_rows
from trouper.engine.products.few_rows import TILE, WARPS, WeightFormat

PROGRAM = """
#include "cuda_on_threads.h"
#include "%(included)s"
#include "%(source)s"
using T = bfloat16;
int main() {
    const int rows = %(rows)d, inputs = %(inputs)d, outputs = %(outputs)d, groups = inputs / %(group)d;
    const T* x = read<T>(rows * inputs);
    const void* w = read<char>(outputs * inputs * %(bits)d / 8);
    const T* scales = read<T>(outputs * groups);
    const T* biases = read<T>(outputs * groups);
    const T* bias = read<T>(outputs);
    T* out = (T*)calloc(rows * outputs, sizeof(T));
    const int starts[] = {%(starts)s};
    T* const outs[] = {%(outs)s};
    launch({(rows + %(tiles)d * 8 - 1) / (%(tiles)d * 8), (outputs + 15) / 16, 1}, %(threads)d, [=] {
        few_rows::product<T, %(bits)d, %(group)d, %(tiles)d>(x, w, scales, biases, bias, outs, starts, rows, inputs,
            outputs, true);
    });
    fwrite(out, sizeof(T), rows * outputs, stdout);
}
"""


@pytest.mark.parametrize(
    ("form", "tiles", "sizes", "parts"),
    [
        (WeightFormat(mx.bfloat16), 1, (3, 8, 20), (20,)),
        (WeightFormat(mx.bfloat16), 4, (37, 1032, 17), (17,)),
        (WeightFormat(mx.bfloat16), 4, (11, 264, 100), (48, 16, 36)),
        (WeightFormat(mx.bfloat16, 4, 32), 1, (9, 1056, 16), (16,)),
        (WeightFormat(mx.bfloat16, 4, 64), 4, (21, 2240, 20), (20,)),
        (WeightFormat(mx.bfloat16, 4, 64), 1, (5, 320, 52), (16, 36)),
        (WeightFormat(mx.bfloat16, 8, 64), 4, (9, 576, 20), (20,)),
    ],
    ids=str,
)
@pytest.mark.long(but=("*bits=16*4-*17,)*", "*bits=4, group_size=32*", "*bits=8*"))
def test_the_kernel_is_a_product_with_the_transposed_matrix(
    form: WeightFormat,
    tiles: int,
    sizes: tuple[int, int, int],
    parts: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """`parts`: numbers of outputs that have an array of their own."""
    rows, inputs, outputs = sizes
    drawn = mx.random.normal((rows + outputs, inputs), key=mx.random.key(inputs)).astype(
        mx.bfloat16
    )
    x, full, bias = (
        drawn[:rows],
        drawn[rows:] * inputs**-0.5,
        mx.arange(outputs).astype(mx.bfloat16) / outputs,
    )
    given = [
        full,
        mx.zeros((outputs, inputs), mx.bfloat16),
        mx.zeros((outputs, inputs), mx.bfloat16),
    ]
    if form.bits < 16:
        given = list(mx.quantize(full, form.group_size, form.bits))
        scales, biases = (part.astype(mx.float32) for part in given[1:])
        # Rounded once.
        full = mx.dequantize(given[0], scales, biases, form.group_size, form.bits).astype(
            mx.bfloat16
        )
    expected = x.astype(mx.float32) @ full.astype(mx.float32).T + bias.astype(mx.float32)
    names = {
        "rows": rows,
        "inputs": inputs,
        "outputs": outputs,
        "tiles": tiles,
        "bits": form.bits,
        "group": form.group_size or 1,
        "threads": WARPS * 32,
        "included": INCLUDED,
        "source": few_rows.FILE,
    }
    starts = [0, *accumulate(parts)][:-1]
    names |= {
        "starts": ", ".join(map(str, starts)),
        "outs": ", ".join(f"out + {rows} * {start}" for start in starts),
    }
    read = [np.array(array.view(mx.uint8)).tobytes() for array in (x, *given, bias)]
    done = on_threads.run(PROGRAM % names, b"".join(read), tmp_path)
    made = np.split(np.frombuffer(done, np.uint16), [rows * start for start in starts[1:]])
    columns = [array.reshape(rows, size) for array, size in zip(made, parts, strict=True)]
    got = mx.array(np.concatenate(columns, axis=1)).view(mx.bfloat16)
    np.testing.assert_allclose(
        np.array(got.astype(mx.float32)), np.array(expected), rtol=2**-8, atol=1e-4
    )


def test_the_file_and_its_module_agree() -> None:
    text = few_rows.FILE.read_text()
    assert f"WARPS = {WARPS};" in text and f"({TILE} * TILES)" in text
