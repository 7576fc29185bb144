"""Random LoRA adapters in the forms of PEFT and of mlx-lm, and models with one of them fused by
mlx-lm itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import load_adapters, load_model

from trouper.engine.lora.lora_layers import KINDS, sizes_of

Form = Literal["peft", "mlx"]


def layers_of(model: nn.Module, most: int = 1000) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers in the model's blocks, by path."""
    found = [
        path
        for path, layer in model.named_modules()
        if type(layer) in KINDS and ".layers." in f".{path}"
    ]
    modules = dict(model.named_modules())
    return {path: sizes_of(modules[path]) for path in found[:most]}


def save_adapter(
    model: nn.Module, directory: Path, seed: int, *, form: Form = "mlx", rank: int = 4
) -> Path:
    """An adapter of all linear layers of the model's blocks, that changes what the model says."""
    random = np.random.RandomState(seed)
    weights, scale = dict[str, mx.array](), 2.0
    for path, (inputs, outputs) in layers_of(model).items():
        a = mx.array((random.randn(inputs, rank) / inputs**0.5).astype(np.float32))
        b = mx.array((random.randn(rank, outputs) * 0.1).astype(np.float32))
        if form == "mlx":
            weights |= {f"{path}.lora_a": a, f"{path}.lora_b": b}
        else:
            weights |= {
                f"base_model.model.{path}.lora_{side}.weight": part.T
                for side, part in (("A", a), ("B", b))
            }
    config: dict[str, Any]
    if form == "mlx":
        parameters = {
            "rank": rank,
            "scale": scale,
            "dropout": 0.0,
            "keys": sorted(layers_of(model)),
        }
        config = {"fine_tune_type": "lora", "num_layers": 0, "lora_parameters": parameters}
    else:
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": scale * rank,
            "bias": "none",
            "target_modules": ["q_proj"],
        }
    directory.mkdir(parents=True)
    file = "adapters.safetensors" if form == "mlx" else "adapter_model.safetensors"
    mx.save_safetensors(str(directory / file), weights)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def fused(base: Path, adapter: Path | None) -> nn.Module:
    """The base with an adapter in mlx-lm's form fused into it, as `mlx_lm.fuse` does, in
    float32."""
    model, _ = load_model(base)
    model.set_dtype(mx.float32)
    if adapter is not None:
        load_adapters(model, str(adapter))
        parts = [
            (path, layer.fuse(dequantize=True))
            for path, layer in model.named_modules()
            if isinstance(layer, LoRALinear)
        ]
        assert parts
        model.update_modules(tree_unflatten(parts))
    model.eval()
    return model


def flags(directories: Sequence[Path]) -> tuple[str, ...]:
    """What --adapter says of them: their names are those of the directories."""
    return tuple(f"{directory.name}={directory}" for directory in directories)
