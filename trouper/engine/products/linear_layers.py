"""Linear layers that multiply in the fastest way on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten
from mlx_lm.utils import infer_quant_config

from trouper.engine.platform import device
from trouper.engine.products import few_rows
from trouper.engine.products.few_rows import WeightFormat, Weights
from trouper.workarounds import mlx_lm_separate_layers

# MLX multiplies packed weights by decoding rows (rows, 1, inputs) one by one, and reads all weights
# for each. Here few rows go to our kernel (`few_rows.py`), more become one array for MLX, many meet
# unpacked weights by cuBLAS, and layers with the same input share a launch
# (`mlx_lm_separate_layers.py`). A layer of a subclass takes the weights of MLX's, as with
# `lora_layers.py`.

DTYPES = (mx.bfloat16, mx.float16)
PACKED_BITS = (4, 8)

# Maximum of packed rows for our kernel, and minimum for unpacking weights (docs/performance.md).
# MLX compiles kernels for up to 16, up to 32 and more rows at first use; only the last precedes
# requests.
MAX_PACKED_ROWS, MIN_UNPACKED_ROWS = 32, 192

# Denominator of the memory for an unpacked matrix. MLX has up to ten CUDA graphs in flight, each
# with one or two.
UNPACKED_PART = 128

# Maximum of rows times bytes of plain weights: cuBLAS is worth its launch beyond
# (benchmarks/RESULTS.md).
MAX_BYTES = 2**29

# Maximum of rows for two matrices at once by MLX: activations read such results more slowly.
MAX_SPLIT_ROWS = 512
HELD = "transposed weights"  # Key in a layer's `__dict__` of its weights and their view.

# Up to this size of a matrix our kernel has at least these rows: launching dominates
# (benchmarks/RESULTS.md).
SMALL_BYTES, SMALL_ROWS = 2**23, 320
Method = Callable[[mx.array], mx.array]


def pack_as_stored(module: nn.Module, weights: Mapping[str, mx.array]) -> None:
    """Quantize layers whose weights are packed, as shapes say."""

    def packing(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(layer, "to_quantized") or f"{path}.scales" not in weights:
            return False
        return infer_quant_config(path, layer, weights)

    if any(name.endswith(".scales") for name in weights):
        nn.quantize(module, class_predicate=packing)


class FastLinear(nn.Linear):
    """A linear layer with less launch time for few rows."""

    def __call__(self, x: mx.array) -> mx.array:
        merged = mlx_lm_separate_layers.result(self, x, _plain_products)
        return _plain_product(self, x) if merged is None else merged

    def transposed(self) -> mx.array:
        """The weights as (inputs, outputs): a view, evaluated once, since each pass would
        instantiate the operation."""
        weight = self.weight
        held: tuple[mx.array, mx.array] | None = self.__dict__.get(HELD)
        if held is None or held[0] is not weight:
            held = weight, weight.T
            mx.eval(held[1])
            self.__dict__[HELD] = held  # As an attribute it would be one of the layer's parameters.
        return held[1]


class FastQuantizedLinear(nn.QuantizedLinear):
    """A linear layer that reads packed weights once for all rows."""

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


def prepare(model: nn.Module) -> None:
    """Make layers fast, lazily, if the device runs the kernel."""
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
    """Let layers multiply as MLX does, for comparison, except layers with adapters."""
    usual = {kind: base for base, kind in KINDS.items()}
    plain = dict[str, nn.Module]()
    for path, layer in model.named_modules():
        vars(layer).pop(HELD, None)
        mlx_lm_separate_layers.separate(layer)
        if type(layer) in usual:
            plain[path] = convert(layer, usual[type(layer)])
    replace_layers(model, plain)


def convert(layer: nn.Module, kind: type[nn.Module]) -> nn.Module:
    made: nn.Module = dict.__new__(kind)
    dict.update(made, layer)
    vars(made).update(vars(layer))
    return made


def replace_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    model.update_modules(tree_unflatten([*layers.items()]))


@cache
def max_unpacked_bytes() -> int:
    """Size of the largest matrix that is unpacked for a product."""
    return device.memory_limit_bytes() // UNPACKED_PART


def max_plain_rows(matrix_bytes: int) -> int:
    """Rows that our kernel multiplies by plain weights of this size."""
    return max(MAX_BYTES // matrix_bytes, SMALL_ROWS if matrix_bytes <= SMALL_BYTES else 0)


def _plain_product(layer: FastLinear, x: mx.array) -> mx.array:
    bias = layer.get("bias")
    if _in_one_type(x, layer.weight, bias) and _kernel_takes(x, layer.weight.nbytes):
        return few_rows.product(WeightFormat(x.dtype), x, Weights(layer.weight, bias=bias))
    return _transposed_product(layer, x)


def _kernel_takes(x: mx.array, matrix_bytes: int) -> bool:
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
    """Products with each merged matrix by our kernel, if possible; by MLX for one row (contiguous
    results) or two matrices (the activation reads any layout)."""
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
    rows = x.size // x.shape[-1]
    if rows == 1:
        return mlx_lm_separate_layers.split(nn.QuantizedLinear.__call__(layer, x), sizes, axis=-1)
    form = _packed_format(layer, x) if rows <= MAX_PACKED_ROWS else None
    if form is not None and few_rows.supports(form, x.shape[-1]):
        return few_rows.products(form, x, _packed_weights(layer), sizes)
    return None


def _packed_format(layer: Any, x: mx.array) -> WeightFormat | None:
    """The format of packed weights for our kernel; None: unsuitable for the kernel."""
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
