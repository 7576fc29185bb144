"""Lets linear layers multiply in the way that is fastest on a CUDA device.

MLX's products over packed weights are made for the rows of one prompt, an array (1, tokens,
inputs). Decoding rows are (rows, 1, inputs), and these are multiplied one by one: each reads all
weights. On an H200, 32 rows by a packed matrix (9728, 2560) take 319 us so, and 32 as one array.
So:

- few rows go to our kernel (`few_rows.py`), packed or not;
- more rows are made one array for MLX's kernel;
- many rows are multiplied by unpacked weights: then cuBLAS's product is worth the unpacking;
- layers that get the same input are multiplied at once (`merged_layers.py`), where launching is
  most of a product.

A layer gets a subclass of its class, and keeps its weights, as with adapters (`lora_layers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from trouper.engine.platform import device
from trouper.engine.products import few_rows
from trouper.engine.products.few_rows import WeightFormat, Weights
from trouper.workarounds import mlx_lm_separate_layers

DTYPES = (mx.bfloat16, mx.float16)
PACKED_BITS = (4, 8)
MAX_PACKED_ROWS, MIN_UNPACKED_ROWS = 32, 192
"""Maximum number of packed rows for our kernel, and minimum for which weights are unpacked. On an
H200, by a packed matrix (9728, 2560), launched one by one, microseconds: 8 rows 18 here and 22 as
one array by MLX, 32 rows 32 and 33, 64 rows 52 and 36; 128 rows 65 by MLX and 111 unpacked, 512
rows 215 and 135, 2,048 rows 741 and 227. MLX compiles a kernel for up to 16 rows and one for up to
32, each at its first product, the second in 39 s; the one for more rows is compiled before the
first request, since prompts use it."""
UNPACKED_PART = 128
"""Part of the device's memory that an unpacked matrix may have, as its denominator. MLX has up to
ten CUDA graphs in flight, each with one or two of them."""
MAX_BYTES = 2**29
"""Maximum of rows times bytes of plain weights: cuBLAS's product of larger ones is worth what
launching it takes. On an H200 (microseconds, without launching): 8 rows by (9728, 2560) take 21
here and 15 by cuBLAS, by (3072, 1024) 4.2 and 4.7; 32 rows 29 and 15, 7 and 5. Steps of the engine
on an H100, the fastest of 72 with 2**28, 2**29, 2**30 and 2**31: 0.6B with 8 rows 3.8, 3.7, 3.6 and
3.6 ms, with 16 4.5, 4.0,
3.9 and 3.9; 4B with 8 6.2, 5.8, 5.9 and 5.8, with 16 7.1, 6.5, 7.5 and 7.5, with 32 7.1, 7.0, 6.9
  and 8.4; 8B with 8 7.9, 7.7, 8.3 and 8.3, with 32
9.0, 8.7, 9.4 and 9.5."""
MAX_SPLIT_ROWS = 512
"""Maximum number of rows of a product by MLX with two matrices at once. An activation reads a part
of its result in more time than an array of its own."""
HELD = "transposed weights"
"""Key of a layer's weights and their view in its `__dict__`."""
SMALL_BYTES, SMALL_ROWS = 2**23, 320
"""Size of a matrix up to which our kernel has at least so many rows: launching is most of such a
product also where cuBLAS's is faster. The pass over a lone prompt in the engine, one H100, in
turns, medians of 15 (the fastest), with 2**29 alone and with more by our kernel, milliseconds: 0.6B
(matrices of up to 6 MiB), 77 tokens 9.3 (6.6) and 6.8 (5.9), 300 tokens 13.6 (9.1) and 10.5 (9.1);
4B with 300 tokens, of whose matrices keys' and values' are as small, 15.8 (13.8) and 15.4 (13.7).
Larger matrices of 4B do not pay: 77 tokens take 12.0 ms, with matrices of 20 MiB 12.5, and with all
of them 17.2."""
Method = Callable[[mx.array], mx.array]


class FastLinear(nn.Linear):
    """A linear layer, of which few rows take less time to launch."""

    def __call__(self, x: mx.array) -> mx.array:
        merged = mlx_lm_separate_layers.result(self, x, _plain_products)
        return _plain_product(self, x) if merged is None else merged

    def transposed(self) -> mx.array:
        """The weights as (inputs, outputs): a view that is evaluated once. As an operation of each
        pass it would be instantiated in each: 252 of them in a pass of 36 layers take 0.7 of 9.3 ms
        of a CPU's thread (two cores, medians of 71 in turns)."""
        weight = self.weight
        held: tuple[mx.array, mx.array] | None = self.__dict__.get(HELD)
        if held is None or held[0] is not weight:
            held = weight, weight.T
            mx.eval(held[1])
            self.__dict__[HELD] = held  # As an attribute it would be one of the layer's parameters.
        return held[1]


class FastQuantizedLinear(nn.QuantizedLinear):
    """A linear layer with packed weights, which are read once for all rows."""

    def __call__(self, x: mx.array) -> mx.array:
        merged = mlx_lm_separate_layers.result(self, x, _packed_products)
        return _packed_product(self, x, super().__call__) if merged is None else merged


class FastQuantizedEmbedding(nn.QuantizedEmbedding):
    """A packed embedding that computes logits in the same way."""

    def as_linear(self, x: mx.array) -> mx.array:
        return _packed_product(self, x, super().as_linear)


KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FastLinear,
    nn.QuantizedLinear: FastQuantizedLinear,
    nn.QuantizedEmbedding: FastQuantizedEmbedding,
}
"""Layers that are made fast, and their subclasses."""


def prepare(model: nn.Module) -> None:
    """Make the layers of the model fast, if the device runs the kernel: it reads contiguous
    matrices. Nothing is evaluated."""
    fast = dict[str, nn.Module]()
    for path, layer in model.named_modules() if device.runs_cuda_kernels() else ():
        if type(layer) in KINDS:
            for name in ("weight", "scales", "biases"):
                if name in layer:
                    layer[name] = mx.contiguous(layer[name])
            fast[path] = convert(layer, KINDS[type(layer)])
    replace_layers(model, fast)
    mlx_lm_separate_layers.merge(model, (FastLinear, FastQuantizedLinear), few_rows.BLOCK_OUTPUTS)


def unprepare(model: nn.Module) -> None:
    """Let the model's layers multiply as MLX does, to compare with that. Layers with adapters stay
    as they are."""
    usual = {kind: base for base, kind in KINDS.items()}
    plain = dict[str, nn.Module]()
    for path, layer in model.named_modules():
        vars(layer).pop(HELD, None)
        mlx_lm_separate_layers.separate(layer)
        if type(layer) in usual:
            plain[path] = convert(layer, usual[type(layer)])
    replace_layers(model, plain)


def convert(layer: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Make a layer of another class with the parameters and the settings of `layer`."""
    made: nn.Module = dict.__new__(kind)
    dict.update(made, layer)
    vars(made).update(vars(layer))
    return made


def replace_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Put layers into the model, by their paths."""
    model.update_modules(tree_unflatten([*layers.items()]))


@cache
def max_unpacked_bytes() -> int:
    """Maximum size of a matrix that is unpacked for a product."""
    return device.memory_limit_bytes() // UNPACKED_PART


def max_plain_rows(matrix_bytes: int) -> int:
    """Maximum number of rows that our kernel multiplies by plain weights of this size."""
    return max(MAX_BYTES // matrix_bytes, SMALL_ROWS if matrix_bytes <= SMALL_BYTES else 0)


def _plain_product(layer: FastLinear, x: mx.array) -> mx.array:
    bias = layer.get("bias")
    if _in_one_type(x, layer.weight, bias) and _kernel_takes(x, layer.weight.nbytes):
        return few_rows.product(WeightFormat(x.dtype), x, Weights(layer.weight, bias=bias))
    return _transposed_product(layer, x)


def _kernel_takes(x: mx.array, matrix_bytes: int) -> bool:
    """Whether our kernel multiplies these rows by plain weights of this size and of their type."""
    rows = x.size // x.shape[-1]
    return 1 < rows <= max_plain_rows(matrix_bytes) and few_rows.supports(
        WeightFormat(x.dtype), x.shape[-1]
    )


def _transposed_product(layer: FastLinear, x: mx.array) -> mx.array:
    bias = layer.get("bias")
    return x @ layer.transposed() if bias is None else mx.addmm(bias, x, layer.transposed())


def _plain_products(
    layer: FastLinear, x: mx.array, sizes: tuple[int, ...]
) -> Sequence[mx.array] | None:
    """Products with each of the matrices of merged layers: by our kernel, if it computes each
    one's; else by MLX, if there is one row, whose results are contiguous, or if there are two
    matrices, whose results go through an activation that reads them in any layout."""
    rows, bias = x.size // x.shape[-1], layer.get("bias")
    if not _in_one_type(x, layer.weight, bias):
        return None
    if _kernel_takes(x, layer.weight.nbytes // layer.weight.shape[0] * max(sizes)):
        return few_rows.products(WeightFormat(x.dtype), x, Weights(layer.weight, bias=bias), sizes)
    if rows == 1 or (len(sizes) == 2 and rows <= MAX_SPLIT_ROWS):
        return mlx_lm_separate_layers.split(_transposed_product(layer, x), sizes, axis=-1)
    return None


def _packed_products(
    layer: FastQuantizedLinear, x: mx.array, sizes: tuple[int, ...]
) -> Sequence[mx.array] | None:
    """Products of few rows with each of the matrices of merged layers."""
    rows = x.size // x.shape[-1]
    if rows == 1:
        return mlx_lm_separate_layers.split(nn.QuantizedLinear.__call__(layer, x), sizes, axis=-1)
    form = _packed_format(layer, x) if rows <= MAX_PACKED_ROWS else None
    if form is not None and few_rows.supports(form, x.shape[-1]):
        return few_rows.products(form, x, _packed_weights(layer), sizes)
    return None


def _packed_format(layer: Any, x: mx.array) -> WeightFormat | None:
    """The format of packed weights, if our kernel may multiply them by these rows."""
    known = layer.mode == "affine" and layer.bits in PACKED_BITS
    if not (known and _in_one_type(x, layer.scales, layer.biases, layer.get("bias"))):
        return None
    return WeightFormat(x.dtype, layer.bits, layer.group_size)


def _packed_weights(layer: Any) -> Weights:
    return Weights(layer.weight, layer.scales, layer.biases, layer.get("bias"))


def _packed_product(layer: Any, x: mx.array, usual: Method) -> mx.array:
    rows = x.size // x.shape[-1]
    if rows < 2:
        return usual(x)
    if (form := _packed_format(layer, x)) is not None:
        weights = _packed_weights(layer)
        if rows <= MAX_PACKED_ROWS and few_rows.supports(form, x.shape[-1]):
            return few_rows.product(form, x, weights)
        unpacked_bytes = layer.weight.shape[0] * x.shape[-1] * x.dtype.size
        if rows >= MIN_UNPACKED_ROWS and unpacked_bytes <= max_unpacked_bytes():
            return _unpacked_product(form, x, weights)
    if x.shape[-2] == rows:
        return usual(x)
    product = usual(x.reshape(rows, x.shape[-1]))
    return product.reshape(*x.shape[:-1], product.shape[-1])


def _unpacked_product(form: WeightFormat, x: mx.array, weights: Weights) -> mx.array:
    full = few_rows.unpacked(form, weights)
    return x @ full.T if weights.bias is None else mx.addmm(weights.bias, x, full.T)


def _in_one_type(x: mx.array, *others: mx.array | None) -> bool:
    return x.dtype in DTYPES and all(other is None or other.dtype == x.dtype for other in others)
