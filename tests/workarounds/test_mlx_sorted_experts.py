"""Expert layers with biases: right, and laid out as MLX's kernel for sorted experts expects it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from tests.families import build
from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.platform import device
from trouper.workarounds.mlx_sorted_experts import RowMajorExperts, has_biased_experts, row_major

ROWS, EXPERTS, INPUTS, OUTPUTS = 126, 8, 32, 64


def strides(array: mx.array) -> tuple[int, ...]:
    mx.eval(array)
    return np.array(array, copy=False).strides


def test_a_view_with_the_strides_of_a_row_major_array() -> None:
    x = mx.expand_dims(mx.arange(6.0).reshape(3, 2), -2)
    assert strides(x)[1] != strides(x)[0], (
        "expand_dims wrote a stride that no row-major array has, or this shows nothing"
    )
    assert strides(row_major(x)) == strides(mx.zeros((3, 1, 2)) + 1)
    assert mx.array_equal(row_major(x), x)


def layer(quantized: bool) -> SwitchLinear | QuantizedSwitchLinear:
    mx.random.seed(1)
    plain = SwitchLinear(INPUTS, OUTPUTS, EXPERTS, bias=True)
    plain.bias = mx.random.normal(plain.bias.shape)
    return plain.to_quantized(group_size=32, bits=8) if quantized else plain


@pytest.mark.parametrize("quantized", [False, True])
def test_each_row_is_multiplied_by_its_expert(quantized: bool) -> None:
    """Also where the layer's input is the output of another, with whatever strides that has."""
    experts = layer(quantized)
    x = mx.expand_dims(mx.random.normal((ROWS, INPUTS)), -2)
    indices = mx.sort(mx.random.randint(0, EXPERTS, (ROWS,)).astype(mx.uint32))
    unsorted = np.array(experts(x, indices))
    assert has_biased_experts(experts)
    output = RowMajorExperts(experts)(row_major(x), indices, sorted_indices=True)
    assert strides(output) == strides(mx.zeros(output.shape) + 1)
    np.testing.assert_allclose(np.array(output), unsorted, atol=5e-3)


def test_models_with_biased_experts_are_changed_and_others_are_not() -> None:
    biased, plain = build("gpt_oss"), build("qwen3_moe")
    layers = 3 * len(biased.layers)
    assert count(biased, RowMajorExperts) == 0
    for _ in range(2):
        adapted(biased), adapted(plain)
        assert (count(biased, RowMajorExperts), count(biased, SwitchLinear)) == (layers, layers)
    assert count(plain, RowMajorExperts) == 0


def test_mlx_vlms_copy_of_the_layer_is_changed_too() -> None:
    layers = pytest.importorskip("mlx_vlm.models.switch_layers")
    assert has_biased_experts(layers.SwitchLinear(8, 8, 2, bias=True))
    assert not has_biased_experts(layers.SwitchLinear(8, 8, 2, bias=False))


@pytest.mark.skipif(not device.runs_cuda_kernels(), reason="the kernel is CUDA's")
def test_it_is_still_needed() -> None:
    """MLX's product by sorted experts differs where an axis of one row has another stride."""
    experts = SwitchLinear(INPUTS, OUTPUTS, EXPERTS, bias=False)
    x = mx.expand_dims(mx.random.normal((ROWS, INPUTS)), -2)
    indices = mx.sort(mx.random.randint(0, EXPERTS, (ROWS,)).astype(mx.uint32))
    mx.eval(x, indices)
    sorted_product = experts(x, indices, sorted_indices=True)
    assert not mx.allclose(sorted_product, experts(x, indices), atol=0.1)


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for _, module in model.named_modules())
