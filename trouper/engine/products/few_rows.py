"""Products of few rows by a CUDA kernel of ours (`few_rows.cuh`).

cuBLAS gets a CUDA graph for each product, whose launch exceeds a small matrix's time
(docs/performance.md).
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
WARPS, TILE = 8, 8  # Warps of a block, rows of a tile.
BLOCK_OUTPUTS = 16
MAX_TILES = 4  # Maximum number of tiles of a block.

# Sizes of the trial: tiles, blocks and turns of warps are partial.
TRIED_ROWS, TRIED_OUTPUTS, TRIED_INPUTS = 13, 40, 1152
TRIED_SIZES = (16, 16, 8)  # Outputs of several matrices in the trial.
TRIED_ERROR = 0.05  # Results are about 1, in bfloat16 within 0.02.


@attrs.frozen
class WeightFormat:
    """Parameters of a compiled kernel."""

    dtype: mx.Dtype
    """Rows, scales and results: bfloat16 or float16."""
    bits: int = 16
    """Bits of a weight: 4 or 8 packed; 16 for `dtype`."""
    group_size: int = 0
    """Weights per scale."""

    @property
    def step(self) -> int:
        """The number of inputs must be a multiple: 16 bytes of weights, and whole groups."""
        return max(128 // self.bits, self.group_size)


@attrs.frozen(eq=False)
class Weights:
    """A weight matrix: (outputs, inputs), or (outputs, inputs * bits / 32) uint32 with `scales` and
    `biases`, (outputs, inputs / group size) each; contiguous."""

    matrix: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bias: mx.array | None = None
    """(outputs,), added to each row."""


def unpacked(form: WeightFormat, weights: Weights) -> mx.array:
    """The matrix (outputs, inputs) of packed weights."""
    assert weights.scales is not None
    return mx.dequantize(weights.matrix, weights.scales, weights.biases, form.group_size, form.bits)


def product(form: WeightFormat, x: mx.array, weights: Weights) -> mx.array:
    """Multiply x (..., inputs): (..., outputs). A row's result is independent of others."""
    return products(form, x, weights, (weights.matrix.shape[0],))[0]


def products(
    form: WeightFormat, x: mx.array, weights: Weights, sizes: tuple[int, ...]
) -> list[mx.array]:
    """Multiply x (..., inputs) by matrices one behind the other: (..., size) each, as of each
    alone. All but the last size are multiples of `BLOCK_OUTPUTS`."""
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
    """Whether the device has the kernel for this format and number of inputs."""
    return inputs % form.step == 0 and computes(form)


@cache
def computes(form: WeightFormat) -> bool:
    """Whether the device runs the kernel for this format rightly; tried once."""
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
    """Each matrix's first output."""
    return mx.array([0, *accumulate(sizes)][:-1], mx.int32)


@cache
def _nothing(dtype: mx.Dtype) -> mx.array:
    """In the place of absent arrays."""
    return mx.zeros(1, dtype)
