"""Products of few rows with a weight matrix by a CUDA kernel of ours (`few_rows.cuh`).

MLX asks cuBLAS for several rows of bfloat16, and each such call is captured into a CUDA graph of
its own: launching that takes longer than a small matrix (docs/performance.md). Why packed weights
have it, too, is in `linear_layers.py`.
"""

from __future__ import annotations

import logging
from functools import cache
from itertools import accumulate
from pathlib import Path

import attrs
import mlx.core as mx

from trouper.engine.platform.cuda_kernels import Kernel, fault_of, kernel

log = logging.getLogger(__name__)

FILE = Path(__file__).with_suffix(".cuh")
SOURCE = """
    int rows = 1;
    for (int axis = 0; axis < x_ndim - 1; axis++) rows *= x_shape[axis];
    T* const outs[] = {%s};
    few_rows::product<T, BITS, GROUP, TILES>(
        x, w, scales, biases, bias, outs, starts, rows, x_shape[x_ndim - 1], w_shape[0],
        bias_shape[0] == w_shape[0]);
"""
WARPS, TILE = 8, 8
"""Number of warps of a block, and of rows in a tile."""
BLOCK_OUTPUTS = 16
"""Number of outputs of a block."""
MAX_TILES = 4
"""Maximum number of tiles of a block."""
TRIED_ROWS, TRIED_OUTPUTS, TRIED_INPUTS = 13, 40, 1152
"""Sizes of the trial: neither full tiles, nor full blocks, nor a full turn of all warps."""
TRIED_SIZES = (16, 16, 8)
"""Numbers of outputs of the matrices in the trial of several."""
TRIED_ERROR = 0.05
"""Largest error in the trial: results are of the order of 1, in bfloat16 within 0.02."""


@attrs.frozen
class WeightFormat:
    """What the kernel is compiled for."""

    dtype: mx.Dtype
    """Of rows, scales and results: bfloat16 or float16."""
    bits: int = 16
    """Bits of a weight: 4 or 8 if weights are packed; 16 if they are numbers of type `dtype`."""
    group_size: int = 0
    """Number of weights that share a scale."""

    @property
    def step(self) -> int:
        """The kernel needs a multiple of this number of inputs: 16 bytes of weights, and whole
        groups."""
        return max(128 // self.bits, self.group_size)


@attrs.frozen(eq=False)
class Weights:
    """A weight matrix: (outputs, inputs), or (outputs, inputs * bits / 32) uint32 with `scales` and
    `biases`, (outputs, inputs / group size) each. All are contiguous."""

    matrix: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bias: mx.array | None = None
    """(outputs,) that is added to each row."""


def unpacked(form: WeightFormat, weights: Weights) -> mx.array:
    """The matrix (outputs, inputs) of packed weights."""
    assert weights.scales is not None
    return mx.dequantize(weights.matrix, weights.scales, weights.biases, form.group_size, form.bits)


def product(form: WeightFormat, x: mx.array, weights: Weights) -> mx.array:
    """Multiply x (..., inputs) by the matrix: (..., outputs). A row's result does not depend on
    others."""
    return products(form, x, weights, (weights.matrix.shape[0],))[0]


def products(
    form: WeightFormat, x: mx.array, weights: Weights, sizes: tuple[int, ...]
) -> list[mx.array]:
    """Multiply x (..., inputs) by matrices that lie one behind the other, each with so many
    outputs: (..., size) each. All but the last size are multiples of `BLOCK_OUTPUTS`. Results are
    those of each matrix alone."""
    outputs, rows, nothing = weights.matrix.shape[0], x.size // x.shape[-1], _nothing(x.dtype)
    tiles = 1 if rows <= TILE else MAX_TILES
    given = (weights.scales, weights.biases, weights.bias)
    return _kernel(len(sizes))(
        inputs=[
            x,
            weights.matrix,
            *(nothing if array is None else array for array in given),
            _starts(sizes),
        ],
        template=[
            ("T", x.dtype),
            ("BITS", form.bits),
            ("GROUP", form.group_size or 1),
            ("TILES", tiles),
        ],
        grid=(-(-rows // (TILE * tiles)) * WARPS * 32, -(-outputs // BLOCK_OUTPUTS), 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(*x.shape[:-1], size) for size in sizes],
        output_dtypes=[x.dtype] * len(sizes),
    )


def supports(form: WeightFormat, inputs: int) -> bool:
    """Whether the kernel multiplies by matrices of this format with so many inputs, and the device
    runs it."""
    return inputs % form.step == 0 and computes(form)


@cache
def computes(form: WeightFormat) -> bool:
    """Whether the device runs the kernel for this format, and rightly. Tried once: an older device
    has no such product, and then MLX's are used."""
    size = -(-TRIED_INPUTS // form.step) * form.step
    drawn = mx.random.normal(
        (TRIED_OUTPUTS + TRIED_ROWS, size), key=mx.random.key(form.bits)
    ).astype(form.dtype)
    full, x = mx.contiguous(drawn[:TRIED_OUTPUTS] * size**-0.5), drawn[TRIED_OUTPUTS:]

    def errors() -> mx.array:
        weights = (
            Weights(full)
            if form.bits == 16
            else Weights(*mx.quantize(full, form.group_size, form.bits))
        )
        matrix = full if form.bits == 16 else unpacked(form, weights)
        expected = x.astype(mx.float32) @ matrix.astype(mx.float32).T
        found = list[mx.array]()
        for rows in (3, TRIED_ROWS):
            for sizes in ((TRIED_OUTPUTS,), TRIED_SIZES):
                results = products(form, x[:rows], weights, sizes)
                found.append(mx.concatenate(results, axis=1).astype(mx.float32) - expected[:rows])
        return mx.concatenate(found)

    if fault := fault_of(errors, TRIED_ERROR):
        log.warning("MLX multiplies few rows by weights of %s: %s", form, fault)
    return not fault


@cache
def _kernel(parts: int) -> Kernel:
    outs = [f"out{part}" for part in range(parts)]
    names = ["x", "w", "scales", "biases", "bias", "starts"]
    return kernel(f"few_rows_{parts}", FILE, names, SOURCE % ", ".join(outs), outs)


@cache
def _starts(sizes: tuple[int, ...]) -> mx.array:
    """The first output of each matrix."""
    return mx.array([0, *accumulate(sizes)][:-1], mx.int32)


@cache
def _nothing(dtype: mx.Dtype) -> mx.array:
    """Takes the place of arrays that are not there: a bias that is not there is 0."""
    return mx.zeros(1, dtype)
