"""Names what a directory has in place of a model for MLX: other formats, web pages, downloads that
have not ended, links without a target."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from trouper.protocol.paths import exists
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.suggested_models import MADE_FOR_MLX

MAX_NAMED = 8
LONGEST_OPENING = 256
# Begin of the file that a clone without Git LFS has instead.
LFS_POINTER = b"version https://git-lfs"
WEIGHTS = "model*.safetensors"
OTHER_VERSION = (
    f"use a version with config.json and {WEIGHTS}, as {MADE_FOR_MLX} has of most models "
    "(`trouper models pull mlx-community/NAME`)"
)
UNFINISHED = ("*.incomplete", "*.part", "*.aria2", "*.crdownload", "blobs/*.incomplete")
UNFINISHED_BELOW = ".cache/huggingface/download/*.incomplete"
ADAPTERS = (
    "adapter_model.safetensors",
    "adapters.safetensors",
    "adapter_model.bin",
    "adapter_config.json",
)
# The first pattern with a file decides.
FORMATS = {
    "*.gguf": "GGUF",
    "ggml*.bin": "GGML",
    "openvino_*": "OpenVINO",
    "consolidated*.safetensors": "Mistral's own format",
    "*.onnx": "ONNX",
    "onnx/*.onnx": "ONNX",
    "*.bin": "weights of PyTorch",
    "*.pt": "weights of PyTorch",
    "*.pth": "weights of PyTorch",
    "*.ckpt": "weights of PyTorch",
    "*.msgpack": "weights of Flax",
    "*.h5": "weights of TensorFlow",
    "saved_model.pb": "weights of TensorFlow",
    "*.tflite": "LiteRT",
    "*.mlpackage": "Core ML",
    "*.mlmodelc": "Core ML",
    "*.nemo": "NeMo",
    "*.npz": "MLX's former format",
}
OPENINGS = {
    b"GGUF": "GGUF",
    b"PK\x03\x04": "a zip archive, as PyTorch writes weights",
    b"\x80\x02": "weights of PyTorch",
    b"\x93NUMPY": "an array of NumPy",
    b"\x89HDF": "HDF5, as TensorFlow writes weights",
    b"\x1f\x8b": "compressed by gzip",
}
# Files whose absence a dangling link would hide.
LINKED = (
    "config.json",
    WEIGHTS,
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.*",
)
MODULE = re.compile(r"\d+_\w+")


def name_content(directory: Path) -> str:
    """A sentence about a directory without weights; "" where nothing is known."""
    if unfinished := _first(directory, *UNFINISHED, UNFINISHED_BELOW):
        return f"{directory} has {unfinished}, a download that has not ended: download it again"
    if adapter := _first(directory, *ADAPTERS):
        return (
            f"{directory} has {adapter}: an adapter: name its base by --model, and it by --adapter"
        )
    if exists(directory / "model_index.json"):
        return f"{directory} has model_index.json: a pipeline of diffusers, which makes no text"
    for pattern, meaning in FORMATS.items():
        if name := _first(directory, pattern):
            return f"{directory} has {name} ({meaning}), which is not read here; {OTHER_VERSION}"
    name = _first(directory, "*.safetensors")
    if name and not fnmatch(name, WEIGHTS):
        return f"{directory} has {name}, and weights are read from {WEIGHTS}: rename it"
    return ""


def _first(directory: Path, *patterns: str) -> str:
    for pattern in patterns:
        for path in sorted(directory.glob(pattern)):
            return path.relative_to(directory).as_posix()
    return ""


def require_config(directory: Path) -> None:
    """Raise `ModelUnusable` without config.json, naming the directory's content."""
    if exists(directory / "config.json"):
        return
    if snapshots := sorted(directory.glob("snapshots/*/config.json")):
        raise ModelUnusable(
            f"{directory} is a directory of the hub's cache: name the snapshot, --model "
            f"{snapshots[-1].parent}"
        )
    if cached := sorted(path.name for path in directory.glob("models--*--*")):
        model = _id_of(cached[0])
        raise ModelUnusable(f"{directory} is the hub's cache: name a model of it, as {model}")
    if directory.name.startswith("models--") and exists(directory / "blobs"):
        model = _id_of(directory.name)
        raise ModelUnusable(
            f"{directory} has no whole model: `trouper models pull {model}` fetches the rest"
        )
    below = sorted(directory.glob("*/config.json"))[:MAX_NAMED]
    models = [path.parent.name for path in below if any(path.parent.glob(WEIGHTS))]
    if content := name_content(directory):
        raise ModelUnusable(content)
    if models:
        raise ModelUnusable(
            f"{directory} has no config.json; models are below it: {', '.join(models)}"
        )
    raise ModelUnusable(
        f"{directory} has no config.json: it is not a model directory; give one with config.json "
        f"and {WEIGHTS}"
    )


def _id_of(name: str) -> str:
    return name.removeprefix("models--").replace("--", "/")


def describe_module(directory: Path) -> str:
    """A remedy for a module's directory of sentence-transformers, or ""."""
    above = directory.absolute().parent
    is_module = MODULE.fullmatch(directory.name) and exists(above / "modules.json")
    return f"; it is a module of the embedder {above}: name that" if is_module else ""


def dangling_links(directory: Path) -> Iterator[Path]:
    """Links without a target among the files of a model. May raise `OSError`."""
    for path in sorted(directory.iterdir()):
        path.lstat()  # Raises where the directory may be listed and not searched.
        is_needed = any(fnmatch(path.name, pattern) for pattern in LINKED)
        if is_needed and path.is_symlink() and not exists(path):
            yield path


def format_of(path: Path) -> str:
    """A file's format by its content, else by its name; "" for one that is not known here."""
    begin = b""
    with suppress(OSError):
        if path.is_file():  # Opening a FIFO would wait for its writer.
            with path.open("rb") as file:
                begin = file.read(LONGEST_OPENING)
    by_content = (meaning for opening, meaning in OPENINGS.items() if begin.startswith(opening))
    by_name = (meaning for pattern, meaning in FORMATS.items() if fnmatch(path.name, pattern))
    return next(by_content, "") or next(by_name, "")


def require_content(path: Path) -> None:
    """Raise `ModelUnusable` for an empty file, Git LFS's pointer, a web page, or weights of another
    format under this name."""
    with suppress(OSError), path.open("rb") as file:
        begin = file.read(LONGEST_OPENING)
        if not begin:
            raise ModelUnusable(f"{path} is empty: download it again")
        if begin.lstrip().lower().startswith((b"<!doctype html", b"<html")):
            raise ModelUnusable(
                f"{path} is a web page, as a site gives where a login or a licence is missing: "
                "download it again"
            )
        if begin.startswith(LFS_POINTER):
            raise ModelUnusable(
                f"{path} is a pointer of Git LFS: get its content by `git lfs pull` in "
                f"{path.parent}"
            )
        for opening, meaning in OPENINGS.items():
            if begin.startswith(opening):
                raise ModelUnusable(f"{path} is {meaning}, by its content; {OTHER_VERSION}")
