"""Products of few rows by our kernel (trouper/engine/products/few_rows.py), on a device that runs
it."""

from __future__ import annotations

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from trouper.engine.platform import device
from trouper.engine.products import linear_layers
from trouper.engine.products.few_rows import WeightFormat, Weights, computes, product, products

pytestmark = pytest.mark.skipif(
    not device.runs_cuda_kernels(), reason="the device has no such kernel"
)
FORMATS = [
    *(
        WeightFormat(mx.bfloat16, bits, group)
        for bits, group in ((16, 0), (4, 32), (4, 64), (8, 64), (8, 128))
    ),
    WeightFormat(mx.float16),
    WeightFormat(mx.float16, 4, 64),
]
"""Each takes some seconds to compile."""
TOLERANCE = 0.1
"""Of layers, some of which MLX multiplies in bfloat16: on a CPU it is off by 0.09. Results are of
the order of 0.6."""
RELATIVE = {mx.float16: 2**-9, mx.bfloat16: 2**-7}


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_kernel_is_a_product_with_the_transposed_matrix(form: WeightFormat) -> None:
    assert computes(form)
    for inputs, outputs in ((128, 5), (1024, 1000), (3072, 64)):
        full = (mx.random.normal((outputs, inputs), key=mx.random.key(1)) * inputs**-0.5).astype(
            form.dtype
        )
        x = mx.random.normal((64, inputs), key=mx.random.key(2)).astype(form.dtype)
        given, bias = [full], mx.arange(outputs).astype(form.dtype) / outputs
        if form.bits < 16:
            given = list(mx.quantize(full, form.group_size, form.bits))
            scales, biases = (part.astype(mx.float32) for part in given[1:])
            full = mx.dequantize(given[0], scales, biases, form.group_size, form.bits).astype(
                form.dtype
            )
        weights = attrs.evolve(Weights(*given), bias=bias)
        with mx.stream(mx.cpu):
            expected = x.astype(mx.float32) @ full.astype(mx.float32).T + bias.astype(mx.float32)
        got = product(form, x, weights)
        np.testing.assert_allclose(
            np.array(got.astype(mx.float32)),
            np.array(expected),
            rtol=RELATIVE[form.dtype],
            atol=2e-3,
        )
        for rows in (1, 3, 8, 9, 32, 33):
            few = product(form, x[:rows][None], weights)[0]
            assert mx.array_equal(few, got[:rows]), (
                "a row's result does not depend on how many there are"
            )
            sizes = (16, 16, outputs - 32) if outputs > 32 else (outputs,)
            parts = products(form, x[:rows], weights, sizes)
            assert [part.shape[-1] for part in parts] == list(sizes)
            assert mx.array_equal(mx.concatenate(parts, axis=-1), got[:rows]), (
                "nor on arrays of their own"
            )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 30, 33, 100, 200])
def test_prepared_layers_are_products_with_their_weights(rows: int, bias: bool) -> None:
    plain = nn.Linear(256, 200, bias=bias)
    plain.set_dtype(mx.bfloat16)
    x = mx.random.normal((rows, 1, 256)).astype(mx.bfloat16)
    for usual in (
        plain,
        plain.to_quantized(64, 4),
        plain.to_quantized(32, 8),
        plain.to_quantized(64, 6),
    ):
        # A layer is replaced in its model.
        model = nn.Sequential(usual)
        linear_layers.prepare(model)
        [layer] = model.layers
        assert type(layer) in linear_layers.KINDS.values()
        got = np.array(layer(x).astype(mx.float32))
        with mx.stream(mx.cpu):
            expected = x.astype(mx.float32) @ matrix_of(layer).T
            if bias:
                expected += layer.bias.astype(mx.float32)
            np.testing.assert_allclose(got, np.array(expected), rtol=0.02, atol=TOLERANCE)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("rows", [1, 2, 8, 30, 33, 100, 600])
def test_merged_layers_are_products_with_their_weights(rows: int, bits: int) -> None:
    """More rows than our kernel has among them, which MLX multiplies at once or not."""
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        module = nn.Module()
        for name, outputs in zip(names, (4096, 1024, 1008), strict=False):
            layer = nn.Linear(2560, outputs, bias=False)
            layer.set_dtype(mx.bfloat16)
            module[name] = layer if bits == 16 else layer.to_quantized(64, bits)
        linear_layers.prepare(module)
        x = (
            mx.random.normal((rows, 1, 2560)) if rows < 600 else mx.random.normal((1, rows, 2560))
        ).astype(mx.bfloat16)
        got = [np.array(module[name](x).astype(mx.float32)) for name in names]
        with mx.stream(mx.cpu):
            for name, result in zip(names, got, strict=True):
                expected = x.astype(mx.float32) @ matrix_of(module[name]).T
                np.testing.assert_allclose(result, np.array(expected), rtol=0.02, atol=TOLERANCE)


def matrix_of(layer: nn.Module) -> mx.array:
    """In float32."""
    weight: mx.array = layer.weight
    if "scales" not in layer:
        return weight.astype(mx.float32)
    scales, biases = (part.astype(mx.float32) for part in (layer.scales, layer.biases))
    return mx.dequantize(weight, scales, biases, layer.group_size, layer.bits)
