"""Models of the zoo with weights that are quantized and stay so, as a GPU or a Mac runs them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn

from tests.zoo.building import build
from trouper.engine.adaptations.adaptation_registry import adapted

FORMATS: dict[str, dict[str, Any]] = {
    "4 bits in groups of 32": {"bits": 4, "group_size": 32},
    "4 bits in groups of 64": {"bits": 4, "group_size": 64},
    "8 bits in groups of 64": {"bits": 8, "group_size": 64},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
}


def quantized(name: str, kind: str, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """What groups do not divide stays as it is, as mlx-lm's converter leaves it. Adapted to the
    device."""
    model, group = build(name), FORMATS[kind]["group_size"]
    model.set_dtype(dtype)

    def fits(_: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0

    nn.quantize(model, class_predicate=fits, **FORMATS[kind])
    adapted(model)
    mx.eval(model.parameters())
    return model


def packed(model: nn.Module) -> int:
    """How many layers have packed weights."""
    return sum("scales" in module for _, module in model.named_modules())


def any_unpacked(model: nn.Module) -> bool:
    """Whether the device needs some of its layers unpacked."""
    return "packed layers with one group a row are unpacked" in adapted(model).names
