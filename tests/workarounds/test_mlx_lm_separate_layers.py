"""Layers that get the same input and are multiplied at once. It is for CUDA: here MLX's operations
take the kernel's place. On the device: tests/device/test_few_rows.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from tests.engine.test_few_rows import plain
from tests.families import build
from trouper.engine.lora import lora_layers
from trouper.engine.platform import device
from trouper.engine.products import few_rows, linear_layers
from trouper.engine.products.few_rows import WeightFormat, Weights
from trouper.workarounds import mlx_lm_separate_layers

INPUTS = 256
ATTENTION, ACTIVATION = {"q_proj": 64, "k_proj": 32, "v_proj": 24}, {"gate_proj": 48, "up_proj": 48}
"""Layers and their numbers of outputs."""


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The numbers of outputs of each call of the kernel."""
    made = list[tuple[int, ...]]()

    def products(
        form: WeightFormat, x: mx.array, weights: Weights, sizes: tuple[int, ...]
    ) -> Sequence[mx.array]:
        made.append(sizes)
        return mlx_lm_separate_layers.split(plain(form, x, weights), sizes, axis=-1)

    monkeypatch.setattr(few_rows, "products", products)
    monkeypatch.setattr(few_rows, "computes", lambda _: True)
    monkeypatch.setattr(device, "runs_cuda_kernels", lambda: True)
    return made


def module_of(
    outputs: dict[str, int], *, bits: int = 16, bias: bool = False, dtype: mx.Dtype = mx.bfloat16
) -> Any:
    module: Any = nn.Module()
    mx.random.seed(len(outputs))
    for name, size in outputs.items():
        layer = nn.Linear(INPUTS, size, bias=bias)
        layer.set_dtype(dtype)
        module[name] = layer if bits == 16 else layer.to_quantized(64, bits)
    mx.eval(module.parameters())
    return module


def rows_of(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal((*shape, INPUTS), key=mx.random.key(2)).astype(dtype)


def results(module: Any, names: Sequence[str], x: mx.array) -> list[mx.array]:
    made: list[mx.array] = [module[name](x) for name in names]
    return made


def prepared_like(module: Any, outputs: dict[str, int], x: mx.array) -> list[mx.array]:
    """Prepare the module; what its layers computed before."""
    usual = results(module, list(outputs), x)
    linear_layers.prepare(module)
    return usual


def equal(one: Sequence[mx.array], other: Sequence[mx.array]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a.shape == b.shape and mx.allclose(a, b, atol=0.1, rtol=0.02) for a, b in pairs)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("outputs", [ATTENTION, ACTIVATION], ids=["attention", "activation"])
def test_few_rows_of_all_layers_are_multiplied_at_once(
    calls: list[tuple[int, ...]], outputs: dict[str, int], bits: int, bias: bool, order: int
) -> None:
    module, x, names = (
        module_of(outputs, bits=bits, bias=bias),
        rows_of(4, 1),
        list(outputs)[::order],
    )
    usual = prepared_like(module, outputs, x)
    for _ in range(2):
        assert equal(results(module, names, x), usual[::order])
    assert calls == [tuple(outputs.values())] * 2


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("outputs", [ATTENTION, ACTIVATION], ids=["attention", "activation"])
def test_one_row_is_multiplied_at_once_by_mlx(
    calls: list[tuple[int, ...]], outputs: dict[str, int], bits: int, tmp_path: Any
) -> None:
    module, x = module_of(outputs, bits=bits), rows_of(1, 1)
    usual = prepared_like(module, outputs, x)
    made: list[Any] = results(module, list(outputs), x)
    assert products_of(made, tmp_path) == 1
    assert equal(made, usual) and not calls
    assert all(memoryview(array.view(mx.uint16)).contiguous for array in made), "no copy is needed"


@pytest.mark.parametrize(
    ("outputs", "expected"), [(ATTENTION, 3), (ACTIVATION, 1)], ids=["attention", "activation"]
)
def test_results_that_lie_apart_are_for_activations(
    outputs: dict[str, int], expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A norm or the write of values would copy them."""
    monkeypatch.setattr(linear_layers, "max_plain_rows", lambda _: 2)
    module, x = module_of(outputs), rows_of(1, 100)
    usual = prepared_like(module, outputs, x)
    made = results(module, list(outputs), x)
    assert products_of(made, tmp_path) == expected
    assert equal(made, usual)


def test_many_rows_are_multiplied_by_each_layer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(linear_layers, "max_plain_rows", lambda _: 2)
    module, x = module_of(ACTIVATION), rows_of(1, linear_layers.MAX_SPLIT_ROWS + 1)
    usual = prepared_like(module, ACTIVATION, x)
    made = results(module, list(ACTIVATION), x)
    assert products_of(made, tmp_path) == 2 and equal(made, usual)


def products_of(made: Sequence[mx.array], tmp_path: Any) -> int:
    """Number of products by MLX that the results need."""
    mx.export_to_dot(str(tmp_path / "pass.dot"), *made)
    text = (tmp_path / "pass.dot").read_text()
    products = text.count('label ="Matmul"') + text.count('label ="QuantizedMatmul"')
    return int(products)


def test_a_compiled_pass_has_one_product(calls: list[tuple[int, ...]]) -> None:
    module, x = module_of(ATTENTION), rows_of(4, 1)
    usual = prepared_like(module, ATTENTION, x)
    results(module, list(ATTENTION), x)
    function = mx.compile(lambda x: results(module, list(ATTENTION), x))
    for _ in range(3):
        assert equal(function(x), usual)
    assert calls == [(64, 32, 24)] * 2, "once in an ordinary pass, once in the trace"


def test_layers_with_other_inputs_multiply_by_themselves_from_then_on(
    calls: list[tuple[int, ...]],
) -> None:
    """As where keys are those of an encoder."""
    module, x, other = module_of(ATTENTION), rows_of(4, 1), rows_of(4, 1) + 1
    alone = module_of(ATTENTION)
    linear_layers.prepare(module)
    for _ in range(2):
        made = [module.q_proj(x), module.k_proj(other), module.v_proj(other)]
        assert equal(made, [alone.q_proj(x), alone.k_proj(other), alone.v_proj(other)])
    assert calls == [(64, 32, 24), (32,), (24,), (64,), (32,), (24,)]


def test_a_layer_that_is_not_called_parts_them(calls: list[tuple[int, ...]]) -> None:
    """As where a layer uses the keys of another one."""
    module = module_of(ATTENTION)
    linear_layers.prepare(module)
    for step in range(3):
        module.q_proj(rows_of(4, 1) + step)
    assert calls == [(64, 32, 24), (64,), (64,)]


def test_a_layer_that_is_called_twice(calls: list[tuple[int, ...]]) -> None:
    module, x, alone = module_of(ACTIVATION), rows_of(4, 1), module_of(ACTIVATION)
    linear_layers.prepare(module)
    names = ["gate_proj", "gate_proj", "up_proj", "up_proj", "gate_proj"]
    assert equal(results(module, names, x), results(alone, names, x))
    assert calls[0] == (48, 48) and len(calls) == 3


def test_weights_that_were_replaced_are_multiplied(calls: list[tuple[int, ...]]) -> None:
    module, x = module_of(ATTENTION), rows_of(4, 1)
    usual = prepared_like(module, ATTENTION, x)
    module.k_proj.weight = module.k_proj.weight * 2
    for _ in range(2):
        assert equal(results(module, list(ATTENTION), x), [usual[0], usual[1] * 2, usual[2]])
    assert calls[-3:] == [(64,), (32,), (24,)]


@pytest.mark.parametrize("bits", [16, 4])
def test_adapters_of_one_of_them(calls: list[tuple[int, ...]], bits: int) -> None:
    class One:
        def added(self, _: mx.array) -> mx.array:
            return mx.ones(ATTENTION["k_proj"], mx.bfloat16)

    module, x = module_of(ATTENTION, bits=bits), rows_of(4, 1)
    usual = prepared_like(module, ATTENTION, x)
    lora_layers.put(module, {"k_proj": One()})  # type: ignore[dict-item]
    assert equal(results(module, list(ATTENTION), x), [usual[0], usual[1] + 1, usual[2]])
    assert calls == [(64, 32, 24)]


def unlike(change: str) -> Any:
    module = module_of(ATTENTION)
    layer = module.k_proj
    if change == "type":
        layer.set_dtype(mx.float16)
    elif change == "bias":
        layer.bias = mx.zeros(32, mx.bfloat16)
    elif change == "packed":
        module.k_proj = layer.to_quantized(64, 4)
    elif change == "no layer":
        module.k_proj = None
    elif change == "another class":
        module.k_proj = type("Another", (nn.Linear,), {})(INPUTS, 32, bias=False)
    return module


@pytest.mark.parametrize("change", ["type", "bias", "packed", "no layer", "another class"])
def test_layers_that_are_not_alike(change: str) -> None:
    module = unlike(change)
    linear_layers.prepare(module)
    assert mlx_lm_separate_layers.MERGED not in module.q_proj.__dict__


def test_formats_and_numbers_of_outputs_that_do_not_fit() -> None:
    odd = module_of({"gate_proj": 40, "up_proj": 40})
    mixed = module_of(ACTIVATION, bits=4)
    mixed.up_proj = module_of(ACTIVATION).up_proj.to_quantized(32, 4)
    for module in (odd, mixed):
        linear_layers.prepare(module)
        assert mlx_lm_separate_layers.MERGED not in module.gate_proj.__dict__


def test_parameters_keep_their_names_and_take_no_more_memory() -> None:
    module = module_of(ATTENTION)
    names, usual = (
        set(dict(tree_flatten(module.parameters()))),
        [module[name].weight for name in ATTENTION],
    )
    values = [mx.array(weight) for weight in usual]
    mx.eval(values)
    del usual
    mx.synchronize()  # CUDA frees what is used no more a little later.
    before = mx.get_active_memory()
    linear_layers.prepare(module)
    mx.eval(module.parameters())
    mx.synchronize()
    assert abs(mx.get_active_memory() - before) < 3 * 4096, "as a copy of all would"
    assert set(dict(tree_flatten(module.parameters()))) == names
    assert all(
        mx.array_equal(module[name].weight, value)
        for name, value in zip(ATTENTION, values, strict=True)
    )


def test_layers_that_are_no_longer_prepared(calls: list[tuple[int, ...]]) -> None:
    module, x = module_of(ATTENTION), rows_of(4, 1)
    usual = prepared_like(module, ATTENTION, x)
    linear_layers.unprepare(module)
    assert mlx_lm_separate_layers.MERGED not in module.q_proj.__dict__
    assert equal(results(module, list(ATTENTION), x), usual) and not calls


def test_it_is_still_needed() -> None:
    """mlx-lm's models have a layer for each matrix."""
    attention = build("llama").layers[0].self_attn
    assert type(attention).__module__.startswith("mlx_lm")
    assert all(isinstance(attention[name], nn.Linear) for name in ATTENTION)
