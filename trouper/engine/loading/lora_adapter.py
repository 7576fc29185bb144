"""A LoRA adapter applied to a model as a whole (--adapter-path)."""

from __future__ import annotations

from pathlib import Path

from mlx import nn
from mlx_lm.utils import load_adapters

from trouper.engine.loading.adapter_files import OF_TOWER, TRAIN_TEXT, is_of_tower
from trouper.engine.platform.error_text import line_of
from trouper.protocol.paths import exists, is_directory, is_file
from trouper.protocol.problems import ModelUnusable
from trouper.storage.checkpoint_files import header_of, read_json, section

MAX_RANK = 4096  # mlx-lm allocates matrices of the config's rank.
FILES = ("adapter_config.json", "adapters.safetensors")


def require(path: str) -> None:
    """Raises `ModelUnusable`."""
    directory = Path(path)
    if not is_directory(directory):
        what = "is a file" if exists(directory) else "no such directory"
        raise ModelUnusable(
            f"--adapter-path {path}: {what}", f"give the directory that holds {' and '.join(FILES)}"
        )
    for name in FILES:
        if not is_file(directory / name):
            raise ModelUnusable(
                f"--adapter-path {path} has no {name}",
                "give the directory of an adapter for mlx-lm",
            )
    config, weights = (directory / name for name in FILES)
    try:
        rank = section(read_json(config), "lora_parameters").get("rank", 0)
        header = header_of(weights)
    except ModelUnusable as error:
        raise ModelUnusable(f"--adapter-path {path}: {error.message}", error.remedy) from error
    if not isinstance(rank, int) or rank > MAX_RANK:
        raise ModelUnusable(f"--adapter-path {path}: its rank is no number up to {MAX_RANK}")
    # mlx-lm ignores names that it does not know.
    if of_tower := next(filter(is_of_tower, header), None):
        raise ModelUnusable(f"--adapter-path {path}: {of_tower} {OF_TOWER}", TRAIN_TEXT)


def apply(model: nn.Module, path: str) -> None:
    """Raises `ModelUnusable`."""
    try:
        load_adapters(model, path)
    except Exception as error:
        # mlx-lm may raise any exception for a misfit.
        raise ModelUnusable(
            f"--adapter-path {path} does not fit the model: {line_of(error)}"
        ) from error
    model.eval()
