"""Kind, size, context and quantization of a model, from its small files and headers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from trouper.protocol.names import Kind
from trouper.protocol.problems import ModelUnusable, printable
from trouper.storage.checkpoint_files import (
    float32_bytes,
    read_checkpoint,
    read_json,
    stored_bytes,
    tensors_of,
)
from trouper.storage.context import UNBOUNDED_CONTEXT
from trouper.storage.foreign_files import name_content
from trouper.storage.sentence_files import context_of

LONGEST_WORD = 40
GGUF = "GGUF"
YEAR_9999 = 253_370_764_800  # In Unix seconds; Python's dates end with it, in any time zone.
# Tokenizers' files that Trouper does not read.
OTHER_TOKENIZERS = {
    "tekken.json": "Mistral's tekken.json",
    "tiktoken.model": "tiktoken.model",
    "*.tiktoken": "a file of tiktoken",
    "tokenizer.model": "tokenizer.model of SentencePiece",
    "spiece.model": "spiece.model of SentencePiece",
    "sentencepiece*.model": "a model of SentencePiece",
}
# Files of sentence-transformers.
EMBEDDER_FILES = ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json")
CROSS_ENCODER = "ForSequenceClassification"
# Endings of generating classes in transformers.
HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSeq2SeqLM")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "quantized",
}
# Model types whose images are known; those that begin with qwen3_5 are others.
IMAGE_FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "mistral3",
    "pixtral",
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "kimi_vl",
    "kimi_k25",
    "idefics3",
    "smolvlm",
    "lfm2_vl",
    "lfm2-vl",
    "llama4",
    "glm4v",
    "glm4v_moe",
    "glm46v",
    "internvl",
    "internvl_chat",
)


@attrs.frozen(kw_only=True)
class ModelFiles:
    """A model's directory."""

    name: str
    """Name for requests: a hub id, or the path below the directory of models."""
    directory: Path
    kind: Kind
    architecture: str
    """The config's model_type."""
    context_length: int
    quantization: str
    """"4-bit", or the dtype."""
    stored_bytes: int
    float32_bytes: int
    """Bytes of all tensors in float32, for CPUs."""
    chats: bool
    created_at: int
    """Unix time of the config."""
    used_at: float
    """Unix time of the last change."""
    images: bool = False
    """Whether the model reads images, of a family whose images are known."""
    problem: str = ""
    """Why the model cannot be loaded; "" if nothing is wrong."""
    source: str = ""
    """The --models-from that has it."""
    is_foreign: bool = False
    """Whether it is in another program's format, and hence listed and never served."""


def read_model_files(name: str, directory: Path) -> ModelFiles:
    """Describe a directory with a config.json. Defects become `problem`."""
    try:
        return _gguf(name, directory) or _described(name, directory)
    except Exception as error:  # noqa: BLE001
        # Any bytes may be in the files: whatever they raise, the other models are served.
        return unreadable(
            name, directory, f"{directory} cannot be read: {type(error).__name__}: {error}"
        )


def unreadable(name: str, directory: Path, problem: str) -> ModelFiles:
    return ModelFiles(
        name=name,
        directory=directory,
        kind="generator",
        architecture="unknown",
        context_length=UNBOUNDED_CONTEXT,
        quantization="unknown",
        stored_bytes=0,
        float32_bytes=0,
        chats=False,
        created_at=0,
        used_at=0.0,
        problem=printable(problem),
    )


def _gguf(name: str, directory: Path) -> ModelFiles | None:
    """Describe a directory of GGUF files without a config; None for others."""
    files = sorted(directory.glob("*.gguf"))
    if not files or (directory / "config.json").exists():
        return None
    return attrs.evolve(
        unreadable(name, directory, name_content(directory)),
        quantization=GGUF,
        stored_bytes=sum(file.stat().st_size for file in files),
        is_foreign=True,
    )


def _described(name: str, directory: Path) -> ModelFiles:
    config: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    problem = ""
    with suppress(ModelUnusable):
        config = read_json(directory / "config.json")
    try:
        config, headers = read_checkpoint(directory)
        tensors = tensors_of(headers.values())
        if not any(next(directory.glob(pattern), None) for pattern in TOKENIZER_FILES):
            problem = no_tokenizer(directory)
    except (ModelUnusable, OSError) as error:
        problem = str(error)
    kind = kind_of(directory, config)
    return ModelFiles(
        name=name,
        directory=directory,
        kind=kind,
        architecture=printable(str(config.get("model_type") or "unknown"), LONGEST_WORD),
        context_length=context_of(directory, config, kind),
        quantization=printable(_quantization(config, tensors), LONGEST_WORD),
        stored_bytes=stored_bytes(tensors),
        float32_bytes=float32_bytes(tensors, config),
        chats=_chats(directory),
        created_at=created_at(directory),
        used_at=_changed_at(directory),
        images=takes_images(config),
        problem=problem,
    )


def takes_images(config: Mapping[str, Any]) -> bool:
    """Whether the config is of a family whose images are known (`engine/vision/layouts.py`)."""
    kind = str(config.get("model_type"))
    if kind not in IMAGE_FAMILIES and not kind.startswith("qwen3_5"):
        return False
    return isinstance(config.get("vision_config"), Mapping)


def kind_of(directory: Path, config: Mapping[str, Any]) -> Kind:
    classes = config.get("architectures")
    named = [str(each) for each in classes] if isinstance(classes, list) else []
    if any(name.endswith(CROSS_ENCODER) for name in named):
        return "reranker"
    if any((directory / name).exists() for name in EMBEDDER_FILES):
        return "embedder"
    return "embedder" if named and not any(name.endswith(HEADS) for name in named) else "generator"


def _quantization(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    for key in ("quantization", "quantization_config"):
        found = config.get(key)
        if isinstance(found, dict):
            bits = found.get("bits")
            return (
                f"{bits}-bit"
                if isinstance(bits, int)
                else str(found.get("quant_method") or "quantized")
            )
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        begin, end = tensor["data_offsets"]
        sizes[tensor["dtype"]] = sizes.get(tensor["dtype"], 0) + end - begin
    dtype = max(sizes, key=lambda each: sizes[each], default="")
    return DTYPES.get(dtype, dtype.lower() or "unknown")


def _chats(directory: Path) -> bool:
    if any((directory / name).exists() for name in TEMPLATE_FILES):
        return True
    try:
        return bool(read_json(directory / "tokenizer_config.json").get("chat_template"))
    except ModelUnusable:
        return False


def created_at(directory: Path) -> int:
    """Unix time of a model's config; 0 without one."""
    try:
        return int(_dated((directory / "config.json").stat().st_mtime))
    except (OSError, ValueError):
        return 0


def _changed_at(directory: Path) -> float:
    try:
        return _dated(max(path.stat().st_mtime for path in directory.glob("*.*")))
    except (OSError, ValueError):
        return 0.0


def _dated(seconds: float) -> float:
    """Return a file's time, or 0 for one that no calendar has."""
    return seconds if 0 <= seconds < YEAR_9999 else 0.0


def no_tokenizer(directory: Path) -> str:
    """Error text for a missing tokenizer.json."""
    for pattern, meaning in OTHER_TOKENIZERS.items():
        if next(directory.glob(pattern), None) is not None:
            return (
                f"{directory} has no tokenizer.json, and {meaning}, which is not read here: use a "
                "conversion with tokenizer.json"
            )
    if names := _own_code(directory):
        return (
            f"{directory} has no tokenizer.json, and Python code for it ({names}), which is not "
            "run here: use a conversion with tokenizer.json"
        )
    return f"{directory} has no tokenizer.json: download it again"


def _own_code(directory: Path) -> str:
    """Names of the tokenizer's Python code, or ""."""
    try:
        named = read_json(directory / "tokenizer_config.json").get("auto_map")
    except ModelUnusable:
        return ""
    code = named.get("AutoTokenizer") if isinstance(named, dict) else None
    return ", ".join(filter(None, code if isinstance(code, list) else [code or ""]))
