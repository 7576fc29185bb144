"""Models that the servers share, written once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import trouper.engine  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from trouper.engine.loading import load
from trouper.protocol.settings import Settings


def save_float32(source: str, target: str) -> None:
    model = load(Settings(model=source), lambda _: None).model
    config = json.loads((Path(source) / "config.json").read_text())
    config.pop("quantization", None)
    config.pop("quantization_config", None)
    _save(model, config, Path(source), Path(target))


def save_tiny(source: str, target: str) -> None:
    config = json.loads((Path(source) / "config.json").read_text())
    config.pop("quantization", None)
    config.pop("quantization_config", None)
    config |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
               "num_key_value_heads": 1, "head_dim": 32, "layer_types": None}  # fmt: skip
    mx.random.seed(0)
    _save(llama.Model(llama.ModelArgs.from_dict(config)), config, Path(source), Path(target))


def _save(model: llama.Model, config: dict[str, object], source: Path, target: Path) -> None:
    scratch = target.with_suffix(".part")
    scratch.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(scratch / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (scratch / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, scratch)
    scratch.rename(target)
