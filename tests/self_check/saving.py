"""Models of the zoo as checkpoints, and a registry of adaptations that is empty."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from tests.families import END, save_tokenizer, write_json
from tests.zoo.building import build
from tests.zoo.catalogue import CONFIGS


def save(name: str, directory: Path, model: nn.Module | None = None) -> Path:
    """What `--model` takes. `model`: other weights of the same config."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten((model or build(name)).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    write_json(directory / "config.json", {**CONFIGS[name], "eos_token_id": END})
    save_tokenizer(directory)
    return directory
