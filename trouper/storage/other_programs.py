"""Where other programs of this machine keep models, and what ollama's manifests say of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from trouper.protocol.paths import expanded, is_directory, is_file
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import LM_STUDIO, OLLAMA, OMLX
from trouper.storage.checkpoint_files import read_json
from trouper.storage.foreign_files import OTHER_VERSION
from trouper.storage.model_files import GGUF, ModelFiles, unreadable

LM_STUDIO_POINTER = "~/.lmstudio-home-pointer"
# The older one first: LM Studio goes on with it where it exists.
LM_STUDIO_HOMES = ("~/.cache/lm-studio", "~/.lmstudio")
MANIFESTS = "manifests"
REGISTRY, LIBRARY = "registry.ollama.ai", "library"
WEIGHTS = "application/vnd.ollama.image.model"
TENSOR = "application/vnd.ollama.image.tensor"


def directory_of_program(source: str) -> Path:
    """The directory of a program's models, whether or not it exists."""
    if source == LM_STUDIO:
        return _lm_studio_home() / "models"
    if source == OLLAMA:
        return expanded(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models")
    assert source == OMLX, f"no program is called {source}"
    return expanded("~/.omlx/models")


def _lm_studio_home() -> Path:
    pointer = expanded(LM_STUDIO_POINTER)
    with suppress(OSError, ValueError):
        if is_file(pointer) and (home := pointer.read_text("utf-8").strip()):
            return expanded(home)
    homes = [expanded(home) for home in LM_STUDIO_HOMES]
    return next((home for home in homes if is_directory(home)), homes[-1])


def ollama_models(root: Path) -> Iterator[ModelFiles]:
    """The models of ollama's manifests below `root`, none of which is read here."""
    if not is_directory(root / MANIFESTS):  # Globbing raises where one may not search.
        return
    for manifest in sorted((root / MANIFESTS).glob("*/*/*/*")):
        with suppress(ModelUnusable):
            yield _described(root, manifest)


def _described(root: Path, manifest: Path) -> ModelFiles:
    host, owner, model, tag = manifest.relative_to(root / MANIFESTS).parts
    names = [part for part in (host, owner, model) if part not in (REGISTRY, LIBRARY)]
    name = f"{'/'.join(names)}:{tag}"
    layers = _layers(manifest)
    kinds = {str(layer.get("mediaType")) for layer in layers}
    sizes = [layer.get("size") for layer in layers]
    form = GGUF if WEIGHTS in kinds else "ollama's tensors" if TENSOR in kinds else "unknown"
    return attrs.evolve(
        unreadable(
            name,
            manifest,
            f"{name} of ollama is kept as {form} in {root / 'blobs'}, which is not read here; "
            f"{OTHER_VERSION}",
        ),
        quantization=form,
        stored_bytes=sum(size for size in sizes if isinstance(size, int)),
        is_foreign=True,
    )


def _layers(manifest: Path) -> list[dict[str, Any]]:
    """Raises `ModelUnusable`, also for a manifest that is none."""
    layers = read_json(manifest).get("layers")
    if not isinstance(layers, list):
        raise ModelUnusable(f"{manifest} is no manifest of ollama")
    return [layer for layer in layers if isinstance(layer, dict)]
