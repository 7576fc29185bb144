"""LoRA adapters: checked before the model is loaded, applied afterwards."""

from __future__ import annotations

from pathlib import Path

from mlx import nn
from mlx_lm.utils import load_adapters

from trouper.engine.platform.error_text import line_of
from trouper.protocol.paths import exists, is_directory, is_file
from trouper.protocol.problems import ModelUnusable

FILES = ("adapter_config.json", "adapters.safetensors")


def require(path: str) -> None:
    """Check that the adapter's files exist. Raises `ModelUnusable`."""
    directory = Path(path)
    if not is_directory(directory):
        what = "is a file" if exists(directory) else "no such directory"
        raise ModelUnusable(f"--adapter-path {path}: {what}", f"give the directory that holds {' and '.join(FILES)}")
    for name in FILES:
        if not is_file(directory / name):
            raise ModelUnusable(f"--adapter-path {path} has no {name}", "give the directory of an adapter for mlx-lm")


def apply(model: nn.Module, path: str) -> None:
    """Apply the adapter to the model. Raises `ModelUnusable`."""
    try:
        load_adapters(model, path)
    except Exception as error:  # any file's content over any model: whatever it raises, they do not fit each other
        raise ModelUnusable(f"--adapter-path {path} does not fit the model: {line_of(error)}") from error
    model.eval()
