"""The first layers of the embedded model: its tokenizer and template, quick, and without sense. A
suite of another server's says more about the protocol than about a model's text."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx

from trouper.engine.loading import bundled_model

LAYERS = 2
LAYER = re.compile(r"\blayers\.(\d+)\.")


def write_shallow_model(target: Path) -> None:
    source = bundled_model.directory()
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, target)
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["num_hidden_layers"] = LAYERS
    (target / "config.json").write_text(json.dumps(config), "utf-8")
    weights = mx.load(str(source / "model.safetensors"))
    assert isinstance(weights, dict)
    kept = {name: weights[name] for name in weights if is_kept(name)}
    mx.save_safetensors(str(target / "model.safetensors"), kept, {"format": "mlx"})


def is_kept(name: str) -> bool:
    layer = LAYER.search(name)
    return layer is None or int(layer.group(1)) < LAYERS
