"""A checkpoint's config, and the headers of its weights with shapes and dtypes:
https://huggingface.co/docs/safetensors"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from trouper.protocol.paths import exists, is_file
from trouper.protocol.problems import ModelUnusable

# Dtypes of packed quantized weights, of any number of bits.
PACKED = ("U32", "I32")
# Configs or indexes with thousands of experts have 10 MB.
LONGEST_JSON_BYTES = 2**24
# Enough for about 200,000 tensors.
LONGEST_HEADER_BYTES = 2**25
# Number of missing files in an error.
MAX_NAMED = 8
# MLX's maximum.
LARGEST_DIMENSION = 2**31 - 1
MAX_AXES = 16
# Bytes of a value.
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "BOOL": 1} | {
    f"{sign}{8 * size}": size for sign in "IU" for size in (1, 2, 4, 8)
}
# Begin of the file that a clone without Git LFS has instead.
LFS_POINTER = b"version https://git-lfs"
LONGEST_OPENING = 256
# Default bits of a packed value.
PACKED_BITS = 4
# Endings of packed weights and scales: AWQ and GPTQ, compressed-tensors, gpt-oss's mxfp4.
PACKED_WITH_SCALES = (
    (".qweight", ".scales"),
    (".weight_packed", ".weight_scale"),
    ("_blocks", "_scales"),
)
# Default values for each scale.
GROUP_SIZE = 64
Header = dict[str, Any]


def read_json(path: Path, longest_bytes: int = LONGEST_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object. Raises `ModelUnusable`."""
    try:
        require_regular(path)
        if (size := path.stat().st_size) > longest_bytes:
            raise ModelUnusable(f"{path} has {size} bytes, and at most {longest_bytes} are read")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelUnusable(
            f"{path.parent} has no {path.name}: it is not a model directory"
        ) from None
    except RecursionError:
        raise ModelUnusable(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnusable(f"{path} is not a JSON object")
    return content


def require_regular(path: Path) -> None:
    """Raise `ModelUnusable` for a FIFO or device, whose read may never end."""
    if exists(path) and not is_file(path):
        raise ModelUnusable(f"{path} is no regular file")


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Part of a config; empty unless a JSON object."""
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def weight_files(directory: Path) -> list[Path]:
    """List the files that mlx-lm loads. Raises `ModelUnusable` without files, or if one of the
    index is missing. An index without any present file is the original model's and is ignored."""
    present = sorted(directory.glob("model*.safetensors"))
    promised = _indexed(directory)
    missing = sorted(promised - {path.name for path in present})
    if not present:
        raise ModelUnusable(_no_weights(directory))
    if missing and len(missing) < len(promised):
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        raise ModelUnusable(
            f"{directory} has no {', '.join(missing[:MAX_NAMED])}{more}: download it again, or "
            "convert it by `mlx_lm.convert`"
        )
    return present


def _indexed(directory: Path) -> set[str]:
    index = directory / "model.safetensors.index.json"
    if not exists(index):
        return set()
    return {str(name) for name in section(read_json(index), "weight_map").values()}


def unnamed_files(directory: Path) -> list[str]:
    present = {path.name for path in directory.glob("model*.safetensors")}
    promised = _indexed(directory)
    return sorted(present - promised) if promised and promised <= present else []


OTHER_VERSION = "use a version with config.json and model*.safetensors"
OTHER_WEIGHTS = {
    "*.gguf": f"GGUF, which is not read here; {OTHER_VERSION}",
    "pytorch_model*.bin": f"weights of PyTorch, which are not read here; {OTHER_VERSION}",
    "*.pth": f"weights of PyTorch, which are not read here; {OTHER_VERSION}",
    "consolidated*.safetensors": f"Mistral's own format, which is not read here; {OTHER_VERSION}",
    "*.onnx": f"ONNX, which is not read here; {OTHER_VERSION}",
    "weights*.npz": f"MLX's former format, which is not read here; {OTHER_VERSION}",
    "adapter_model.safetensors": "an adapter: name its base by --model, and it by --adapter",
    "adapters.safetensors": "an adapter: name its base by --model, and it by --adapter",
}


def _no_weights(directory: Path) -> str:
    return _other_files(directory) or (
        f"{directory} has no weights (model*.safetensors): download it again"
    )


def _other_files(directory: Path) -> str:
    # Say which other files a directory has; "" for no known ones.
    for pattern, meaning in OTHER_WEIGHTS.items():
        if others := sorted(directory.glob(pattern)):
            return f"{directory} has {others[0].name}: {meaning}"
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
    below = sorted(directory.glob("*/config.json"))[:MAX_NAMED]
    models = [path.parent.name for path in below if any(path.parent.glob("model*.safetensors"))]
    if models:
        raise ModelUnusable(
            f"{directory} has no config.json; models are below it: {', '.join(models)}"
        )
    raise ModelUnusable(
        _other_files(directory) or f"{directory} has no config.json: it is not a model directory"
    )


def quantized_by(config: Mapping[str, Any]) -> str:
    """Quantization method of foreign checkpoints; "" for none."""
    quantization = section(config, "quantization_config") or _of_text(config)
    return str(quantization.get("quant_method", ""))


class Tensor(msgspec.Struct, frozen=True):
    """A tensor in the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def header_of(path: Path, longest_bytes: int = LONGEST_HEADER_BYTES) -> Header:
    """Read a safetensors header. Raises `ModelUnusable` for another or a truncated file."""
    require_regular(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if longest_bytes < length <= size - 8:
                text = (
                    f"{path} has a header of {length} bytes, and at most {longest_bytes} are read"
                )
                raise ModelUnusable(text)
            raw = file.read(length) if 8 + length <= size else b""
        if raw:
            header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            tensors = {
                name: msgspec.json.decode(part, type=Tensor) for name, part in header.items()
            }
            if size >= 8 + length + max(
                (each.data_offsets[1] for each in tensors.values()), default=0
            ):
                _require_sound(path, tensors)
                return {name: msgspec.structs.asdict(tensor) for name, tensor in tensors.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnusable(f"{path} is not a safetensors file: {error}") from error
    require_content(path)
    raise ModelUnusable(f"{path} is truncated ({size} bytes): download it again")


def _require_sound(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # Raise `ModelUnusable` where shapes and bytes differ, or tensors share bytes: a small file
    # would take any memory.
    for name, tensor in tensors.items():
        begin, end = tensor.data_offsets
        item = DTYPE_BYTES.get(tensor.dtype)
        sizes = tensor.shape
        if len(sizes) > MAX_AXES or not all(0 <= size <= LARGEST_DIMENSION for size in sizes):
            raise ModelUnusable(f"{path}: {name} has a shape that no tensor has")
        if begin < 0 or end < begin or (item and item * math.prod(sizes) != end - begin):
            raise ModelUnusable(f"{path}: {name} does not have the bytes of its shape")
    spans = sorted(tensor.data_offsets for tensor in tensors.values())
    if any(after[0] < before[1] for before, after in pairwise(spans)):
        raise ModelUnusable(f"{path} has tensors that share bytes")


def require_content(path: Path) -> None:
    """Raise `ModelUnusable` for Git LFS's pointer or a web page."""
    with suppress(OSError), path.open("rb") as file:
        begin = file.read(LONGEST_OPENING)
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


# Tokenizers' files that Trouper does not read.
OTHER_TOKENIZERS = {
    "tekken.json": "Mistral's tekken.json",
    "tiktoken.model": "tiktoken.model",
    "*.tiktoken": "a file of tiktoken",
    "tokenizer.model": "tokenizer.model of SentencePiece",
}


def no_tokenizer(directory: Path) -> str:
    """Error text for a missing tokenizer.json."""
    for pattern, meaning in OTHER_TOKENIZERS.items():
        if next(directory.glob(pattern), None) is not None:
            return (
                f"{directory} has no tokenizer.json, and {meaning}, which is not read here: use a "
                "conversion with tokenizer.json"
            )
    return f"{directory} has no tokenizer.json: download it again"


def tensors_of(headers: Iterable[Header]) -> dict[str, Any]:
    return {name: tensor for header in headers for name, tensor in header.items()}


def stored_bytes(tensors: dict[str, Any]) -> int:
    return sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in tensors.values())


def float32_bytes(tensors: dict[str, Any], config: dict[str, Any]) -> int:
    """Bytes of all tensors in float32."""
    quantization = section(config, "quantization")
    packed_bits = _packed_bits(section(config, "quantization_config") or _of_text(config))
    return 4 * sum(_values(name, tensors, quantization, packed_bits) for name in tensors)


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return section(section(config, "text_config"), "quantization_config")


def _packed_bits(quantization: Mapping[str, Any]) -> int:
    # Bits of each value in configs of AWQ and compressed-tensors.
    groups = [
        section(group, "weights")
        for group in section(quantization, "config_groups").values()
        if isinstance(group, dict)
    ]
    found = next((weights.get("num_bits") for weights in groups), quantization.get("bits"))
    return found if isinstance(found, int) and found > 0 else PACKED_BITS


def _values(
    name: str, tensors: Mapping[str, Any], quantization: Mapping[str, Any], packed_bits: int
) -> int:
    # Number of unpacked values. In mlx-lm's checkpoints scales count their groups, and packed
    # values and biases 0; in others packed values count, and scales 0.
    for packed, scales in PACKED_WITH_SCALES:
        if name.endswith(packed) and tensors[name]["dtype"] in (*PACKED, "U8"):
            begin, end = tensors[name]["data_offsets"]
            return int(8 * (end - begin) // packed_bits)
        if name.endswith(scales) and name.removesuffix(scales) + packed in tensors:
            return 0
    if tensors[name]["dtype"] in PACKED or name.endswith(".biases"):
        return 0
    values: int = math.prod(tensors[name]["shape"])
    return values * (
        _group_size(name.removesuffix(".scales"), quantization) if name.endswith(".scales") else 1
    )


def _group_size(layer: str, quantization: Mapping[str, Any]) -> int:
    # Values for each scale of a layer, whose config may differ.
    found = section(quantization, layer).get("group_size") or quantization.get("group_size")
    return found if isinstance(found, int) and 0 < found <= LARGEST_DIMENSION else GROUP_SIZE
