"""The model as this device computes it, as a directory for a server that does not convert weights
itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from trouper.engine.loading.model_loading import EvaluatedModel

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def save_copy(loaded: EvaluatedModel, target: Path) -> None:
    """Save plain weights, which were converted from what was stored, with the config and the
    tokenizer."""
    target.mkdir(parents=True)
    mx.save_safetensors(
        str(target / "model.safetensors"),
        dict(tree_flatten(loaded.model.parameters())),
        {"format": "mlx"},
    )
    config = {
        key: value for key, value in loaded.config.items() if not key.startswith("quantization")
    }
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (loaded.directory / name).exists():
            shutil.copy(loaded.directory / name, target)
