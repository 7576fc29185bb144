"""Conversion to float32, on CPUs: MLX's own loops for bfloat16 and quantized weights are 5 to 30
times slower than BLAS.

mlx_lm.utils.dequantize_model omits MLA's layers and nvfp4's global scales.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx import nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from trouper.engine.products.linear_layers import replace_layers

PACKAGES = ("mlx", "mlx_lm", "mlx_vlm")
"""mlx-vlm has copies of mlx-lm's classes."""
PLAIN: dict[type[nn.Module], Callable[[], nn.Module]] = {
    nn.QuantizedLinear: lambda: nn.Linear(1, 1, bias=False),
    nn.QuantizedEmbedding: lambda: nn.Embedding(1, 1),
    QuantizedSwitchLinear: lambda: SwitchLinear(1, 1, 1, bias=False),
    QuantizedMultiLinear: lambda: MultiLinear(1, 1, 1),
}


def to_float32(model: nn.Module) -> None:
    """Convert in place and lazily."""
    by_name = {kind.__name__: make for kind, make in PLAIN.items()}
    plain = {
        path: _plain(module, by_name[kind.__name__]())
        for path, module in model.named_modules()
        if (kind := type(module)).__name__ in by_name
        and kind.__module__.partition(".")[0] in PACKAGES
    }
    replace_layers(model, plain)
    model.set_dtype(mx.float32)
    model.eval()


def _plain(quantized: nn.Module, layer: nn.Module) -> nn.Module:
    layer.weight = _weight(quantized)
    if quantized.get("bias") is not None:
        layer.bias = quantized.bias
    return layer


def _weight(layer: nn.Module) -> mx.array:
    # Scales in float32 lose no precision.
    scales, biases = layer.scales, layer.get("biases")
    if mx.issubdtype(scales.dtype, mx.floating):
        scales = scales.astype(mx.float32)
        biases = None if biases is None else biases.astype(mx.float32)
    return mx.dequantize(
        layer.weight,
        scales,
        biases,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        global_scale=layer.get("global_scale"),
        dtype=mx.float32,
    )
