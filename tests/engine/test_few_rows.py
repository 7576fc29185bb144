"""Which products of linear layers our kernel computes (trouper/engine/products/linear_layers.py).
It is for CUDA: here MLX's operations take its place. That it computes the same is tested by
test_few_rows_kernel.py, and on the device by tests/device/test_few_rows.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from tests.arithmetic import cpu_only
from tests.engine.test_exactness import greedy_requests, model_of, play_randomly
from trouper.engine.lora import lora_layers
from trouper.engine.passes.pass_shapes import ROUNDED
from trouper.engine.platform import device
from trouper.engine.products import few_rows, linear_layers
from trouper.engine.products.few_rows import WeightFormat, Weights
from trouper.workarounds import mlx_lm_separate_layers

INPUTS, OUTPUTS = 256, 24
COMPUTES = few_rows.computes


def plain(form: WeightFormat, x: mx.array, weights: Weights) -> mx.array:
    """What the kernel computes, in MLX's operations."""
    full = weights.matrix if form.bits == 16 else few_rows.unpacked(form, weights)
    product = x.astype(mx.float32) @ full.astype(mx.float32).T
    return (product if weights.bias is None else product + weights.bias.astype(mx.float32)).astype(
        x.dtype
    )


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[WeightFormat, int]]:
    """The formats and numbers of rows of each call of the kernel."""
    made = list[tuple[WeightFormat, int]]()

    def products(
        form: WeightFormat, x: mx.array, weights: Weights, sizes: tuple[int, ...]
    ) -> list[mx.array]:
        made.append((form, x.size // x.shape[-1]))
        return mlx_lm_separate_layers.split(plain(form, x, weights), sizes, axis=-1)

    monkeypatch.setattr(few_rows, "products", products)
    monkeypatch.setattr(few_rows, "computes", lambda _: True)
    monkeypatch.setattr(device, "runs_cuda_kernels", lambda: True)
    return made


def linear(dtype: mx.Dtype = mx.bfloat16, *, bias: bool = False, inputs: int = INPUTS) -> nn.Linear:
    mx.random.seed(1)
    layer = nn.Linear(inputs, OUTPUTS, bias=bias)
    layer.set_dtype(dtype)
    return layer


def rows_of(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal((*shape, INPUTS), key=mx.random.key(2)).astype(dtype)


def prepare(layer: nn.Module) -> Any:
    """The layer that takes the path of this one."""
    model = Holder(layer)
    linear_layers.prepare(model)
    return model.layer


class Holder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def check(layer: Any, x: mx.array, method: str = "__call__") -> None:
    """A prepared layer computes what it did before."""
    usual = getattr(layer, method)(x)
    assert mx.allclose(getattr(prepare(layer), method)(x), usual, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_few_rows_of_a_layer(
    calls: list[tuple[WeightFormat, int]], dtype: mx.Dtype, bias: bool
) -> None:
    check(linear(dtype, bias=bias), rows_of(8, 1, dtype=dtype))
    check(linear(dtype, bias=bias).to_quantized(64, 4), rows_of(2, 3, dtype=dtype))
    check(linear(dtype, bias=bias).to_quantized(32, 8), rows_of(5, dtype=dtype))
    assert calls == [
        (WeightFormat(dtype), 8),
        (WeightFormat(dtype, 4, 64), 6),
        (WeightFormat(dtype, 8, 32), 5),
    ]


def test_an_embedding_that_computes_logits(calls: list[tuple[WeightFormat, int]]) -> None:
    embedding = nn.Embedding(OUTPUTS, INPUTS)
    embedding.set_dtype(mx.bfloat16)
    check(embedding.to_quantized(64, 4), rows_of(4, 1), "as_linear")
    assert calls == [(WeightFormat(mx.bfloat16, 4, 64), 4)]


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (linear(), rows_of(1, 1)),
        (linear(), mx.zeros((8, 1, INPUTS), mx.float32)),
        (linear(mx.float32), mx.zeros((8, 1, INPUTS), mx.float32)),
        (linear(), rows_of(linear_layers.MAX_BYTES // (INPUTS * OUTPUTS * 2) + 1)),
        (linear(inputs=20), mx.zeros((4, 20), mx.bfloat16)),
        (linear().to_quantized(64, 4), rows_of(1)),
        (linear().to_quantized(64, 4), rows_of(33)),
        (linear().to_quantized(64, 6), rows_of(8)),
        (linear().to_quantized(32, 4, mode="mxfp4"), rows_of(8)),
        (linear(mx.float32).to_quantized(64, 4), rows_of(8, dtype=mx.float32)),
    ],
    ids=[
        "one row",
        "rows of another type",
        "float32",
        "more than launching costs",
        "inputs that are no whole step",
        "one packed",
        "more packed rows",
        "6 bits",
        "another mode",
        "packed float32",
    ],
)
def test_what_mlx_multiplies(
    calls: list[tuple[WeightFormat, int]], layer: nn.Module, x: mx.array
) -> None:
    check(layer, x)
    assert not calls


@pytest.mark.parametrize(
    ("inputs", "outputs", "rows"),
    [
        (1024, 2048, 320),
        (1024, 3072, 320),
        (2560, 1024, 320),
        (2560, 4096, 25),
        (9728, 2560, 10),
        (512, 512, 1024),
    ],
)
def test_small_matrices_have_more_rows(inputs: int, outputs: int, rows: int) -> None:
    """Those of a 0.6B and a 4B shape in bfloat16, and one that is smaller still."""
    assert linear_layers.max_plain_rows(inputs * outputs * 2) == rows


@pytest.mark.parametrize("bias", [False, True])
def test_a_pass_has_no_operation_that_transposes_weights(bias: bool, tmp_path: Path) -> None:
    layer, x = linear(bias=bias), rows_of(1, 1)
    usual = layer(x)
    layer = prepare(layer)
    names = dict(tree_flatten(layer.parameters())).keys()
    for function in (layer, mx.compile(layer)):
        made = function(x)
        mx.export_to_dot(str(tmp_path / "pass.dot"), made)
        assert "Transpose" not in (tmp_path / "pass.dot").read_text()
        assert mx.array_equal(made, usual)
    assert isinstance(layer, linear_layers.FastLinear)
    assert layer.transposed() is layer.transposed()
    assert dict(tree_flatten(layer.parameters())).keys() == names, "the view is no parameter"


def test_other_weights_are_transposed_anew() -> None:
    layer, other = prepare(linear()), linear()
    layer(rows_of(1))
    other.weight = layer.weight = layer.weight * 2
    assert mx.array_equal(layer(rows_of(1)), other(rows_of(1)))
    linear_layers.unprepare(Holder(layer))
    assert linear_layers.HELD not in layer.__dict__


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of rows that MLX multiplies by packed weights."""
    seen, usual = list[tuple[int, ...]](), mx.quantized_matmul

    def product(x: mx.array, *given: Any, **how: Any) -> mx.array:
        seen.append(tuple(x.shape))
        return usual(x, *given, **how)

    monkeypatch.setattr(mx, "quantized_matmul", product)
    return seen


@pytest.mark.parametrize("bias", [False, True])
def test_more_rows_are_one_array(
    calls: list[tuple[WeightFormat, int]], shapes: list[tuple[int, ...]], bias: bool
) -> None:
    layer = prepare(linear(bias=bias).to_quantized(64, 4))
    check(linear(bias=bias).to_quantized(64, 4), rows_of(33, 1))
    check(linear(bias=bias).to_quantized(32, 4, mode="mxfp4"), rows_of(2, 3))
    layer(rows_of(1, 100))
    assert (
        shapes == [(33, 1, INPUTS), (33, INPUTS), (2, 3, INPUTS), (6, INPUTS), (1, 100, INPUTS)]
        and not calls
    )


@pytest.mark.parametrize("bias", [False, True])
def test_many_rows_are_multiplied_by_unpacked_weights(
    shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    layer = prepare(linear(bias=bias).to_quantized(64, 4))
    check(linear(bias=bias).to_quantized(64, 4), rows_of(2, 96))
    assert shapes == [(2, 96, INPUTS)], "of the layer before it was prepared"
    monkeypatch.setattr(linear_layers, "max_unpacked_bytes", lambda: 1000)
    layer(rows_of(2, 96))
    assert shapes[1:] == [(192, INPUTS)], "a matrix that is too large stays packed"


def test_a_bias_of_another_type_is_left_to_mlx(calls: list[tuple[WeightFormat, int]]) -> None:
    layer = linear(bias=True)
    layer.bias = layer.bias.astype(mx.float32)
    check(layer, rows_of(8))
    assert not calls


def test_layers_that_were_not_prepared_or_are_no_longer(
    calls: list[tuple[WeightFormat, int]],
) -> None:
    prepared, other = Holder(linear()), linear()
    linear_layers.prepare(prepared)
    other(rows_of(4))
    linear_layers.unprepare(prepared)
    prepared.layer(rows_of(4))
    assert not calls


@cpu_only
def test_a_device_without_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not device.runs_cuda_kernels()
    layer = prepare(linear())
    assert type(layer) is nn.Linear


def test_matrices_that_are_views_are_copied_once() -> None:
    layer = linear()
    layer.weight = mx.random.normal((INPUTS, OUTPUTS)).astype(mx.bfloat16).T
    layer = prepare(layer)
    mx.eval(layer.weight)
    assert memoryview(layer.weight.view(mx.uint16)).contiguous


@pytest.mark.parametrize("bits", [16, 4])
def test_adapters_are_added_to_it(calls: list[tuple[WeightFormat, int]], bits: int) -> None:
    class One:
        def added(self, _: mx.array) -> mx.array:
            return mx.ones(OUTPUTS, mx.bfloat16)

    layer = prepare(linear() if bits == 16 else linear().to_quantized(64, bits))
    assert lora_layers.may_have_adapters(layer)
    alone = layer(rows_of(4))
    layer = lora_layers.with_adapters(layer, One())  # type: ignore[arg-type]
    assert lora_layers.may_have_adapters(layer)
    assert mx.array_equal(layer(rows_of(4)), alone + 1) and len(calls) == 2
    layer = lora_layers.with_adapters(layer, None)
    assert mx.array_equal(layer(rows_of(4)), alone) and len(calls) == 3


def test_a_device_that_computes_it_wrongly_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right, form = few_rows.products, WeightFormat(mx.bfloat16, 4, 64)
    COMPUTES.cache_clear()
    assert COMPUTES(form)
    for error in (1, mx.nan):
        monkeypatch.setattr(
            few_rows,
            "products",
            lambda *given, error=error: [part + error for part in right(*given)],
        )
        COMPUTES.cache_clear()
        assert not COMPUTES(form)
        assert "its results are wrong" in caplog.messages[-1]

    def refused(*_: object) -> list[mx.array]:
        raise RuntimeError("Failed to compile kernel: no such instruction.")

    monkeypatch.setattr(few_rows, "products", refused)
    COMPUTES.cache_clear()
    assert not COMPUTES(form) and "no such instruction" in caplog.messages[-1]
    COMPUTES.cache_clear()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_an_engine_whose_layers_use_it(
    calls: list[tuple[WeightFormat, int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(linear_layers, "DTYPES", (mx.float32,))
    model = model_of(name)
    linear_layers.prepare(model)
    try:
        play_randomly(name, greedy_requests(name), 1, ROUNDED)
    finally:
        linear_layers.unprepare(model)
    assert {rows for _, rows in calls} > {2, 3}
