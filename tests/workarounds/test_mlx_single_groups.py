"""Packed layers with one group a row: unpacked where MLX multiplies by them wrongly."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.mla import MultiLinear

from tests.arithmetic import TF32
from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.platform import device
from trouper.workarounds import mlx_single_groups
from trouper.workarounds.mlx_single_groups import is_affected, unpacked

FEW, MANY = 64, 128


def layers(inputs: int, **how: Any) -> dict[str, nn.Module]:
    mx.random.seed(2)
    plain = {
        "linear": nn.Linear(inputs, 96),
        "linear without a bias": nn.Linear(inputs, 96, bias=False),
        "embedding": nn.Embedding(96, inputs),
        "of several heads": MultiLinear(inputs, 96, 3),
    }
    return {name: layer.to_quantized(**how) for name, layer in plain.items()}


def product(layer: nn.Module, rows: int) -> mx.array:
    """On a CPU."""
    mx.random.seed(3)
    width = (
        layer.weight.shape[-1]
        if "scales" not in layer
        else layer.scales.shape[-1] * layer.group_size
    )
    x = mx.random.normal((3, rows, width), stream=mx.cpu)
    with mx.stream(mx.cpu):
        out: mx.array = layer.as_linear(x) if hasattr(layer, "as_linear") else layer(x)
    return out


@pytest.mark.parametrize("bits", [4, 8])
def test_an_unpacked_layer_gives_the_same(bits: int) -> None:
    for name, layer in layers(FEW, group_size=64, bits=bits).items():
        assert is_affected(layer), name
        assert "scales" not in unpacked(layer)
        assert mx.allclose(
            product(unpacked(layer), 5), product(layer, 5), atol=1e-5, stream=mx.cpu
        ), name


def test_mlx_vlms_copy_of_the_layer_of_several_heads_is_unpacked_too() -> None:
    copies = pytest.importorskip("mlx_vlm.models.mla")
    mx.random.seed(2)
    layer = copies.MultiLinear(FEW, 96, 3).to_quantized(group_size=64, bits=4)
    assert is_affected(layer)
    assert mx.allclose(product(unpacked(layer), 5), product(layer, 5), atol=1e-5, stream=mx.cpu)


@pytest.mark.parametrize(
    ("inputs", "how"),
    [
        (MANY, {"group_size": 64, "bits": 4}),
        (FEW, {"group_size": 32, "bits": 4}),
        (FEW, {"group_size": 64, "bits": 6}),
        (FEW, {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    ],
)
def test_other_formats_stay_packed(inputs: int, how: dict[str, Any]) -> None:
    assert not any(map(is_affected, layers(inputs, **how).values()))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(FEW, MANY), nn.Linear(MANY, FEW)]
        nn.quantize(self, group_size=64, bits=4)


def test_a_model_is_unpacked_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for architecture, packed in (
        (mlx_single_groups.WRONG_ON, [False, True]),
        ("sm_80", [True, True]),
        ("", [True, True]),
    ):
        monkeypatch.setattr(device, "architecture", lambda name=architecture: name)
        model = Model()
        adapted(model)
        assert ["scales" in layer for layer in model.layers] == packed


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_products_on_this_device(dtype: mx.Dtype) -> None:
    """Whatever MLX has for them, what a model does once it is adapted is right."""
    model = Model()
    model.set_dtype(dtype)
    adapted(model)
    x = mx.random.normal((16, FEW)).astype(dtype)
    got = model.layers[1](model.layers[0](x)).astype(mx.float32)
    for layer in model.layers:
        x = (x.astype(mx.float32) @ whole(layer).T + layer.bias.astype(mx.float32)).astype(dtype)
    spread = float(mx.abs(x.astype(mx.float32)).max().item())  # type: ignore[arg-type]
    assert (
        mx.abs(got - x.astype(mx.float32)).max()
        < (0.03 if dtype == mx.bfloat16 or TF32 else 1e-4) * spread
    )


@pytest.mark.skipif(
    device.architecture() != mlx_single_groups.WRONG_ON, reason="the kernel is Hopper's"
)
def test_it_is_still_needed() -> None:
    """MLX's own product of rows by a packed layer differs from that by the same numbers
    unpacked."""
    layer = nn.QuantizedLinear.from_linear(nn.Linear(FEW, MANY), group_size=64, bits=4)
    x = mx.random.normal((16, FEW))
    assert not mx.allclose(layer(x), unpacked(layer)(x), atol=0.1)


def whole(layer: nn.Module) -> mx.array:
    weight: mx.array = (unpacked(layer) if "scales" in layer else layer).weight
    return weight.astype(mx.float32)
