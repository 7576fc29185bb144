"""A checkpoint's config, and the headers of its weights with shapes and dtypes:
https://huggingface.co/docs/safetensors"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from trouper.protocol.paths import exists, is_directory, is_file
from trouper.protocol.problems import ModelUnusable
from trouper.storage.foreign_files import (
    MAX_NAMED,
    dangling_links,
    describe_module,
    name_content,
    require_config,
    require_content,
)

# Dtypes of packed quantized weights, of any number of bits.
PACKED = ("U32", "I32")
# Configs or indexes with thousands of experts have 10 MB.
LONGEST_JSON_BYTES = 2**24
# Enough for about 200,000 tensors.
LONGEST_HEADER_BYTES = 2**25
# MLX's maximum.
LARGEST_DIMENSION = 2**31 - 1
MAX_AXES = 16
# Bytes of a value.
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "BOOL": 1} | {
    f"{sign}{8 * size}": size for sign in "IU" for size in (1, 2, 4, 8)
}
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
# By suffix of the config key. The largest models have 130 layers.
MAXIMA = {"layer": 2048, "layers": 2048, "loops": 2048, "experts": 2**16, "groups": 2**16}
LONGEST_KIND = 200
SHARD = re.compile(r"(?P<name>.+)-(?P<number>\d{1,5})-of-(?P<count>\d{1,5})\.safetensors")
Header = dict[str, Any]


def read_checkpoint(
    directory: Path, *, is_drafter: bool = False
) -> tuple[dict[str, Any], dict[Path, Header]]:
    """The config, and the header of each file of weights. `is_drafter`: needs no model_type. Raises
    `ModelUnusable` for anything that shows without the architecture's code."""
    require_directory(directory)
    config = read_json(directory / "config.json")
    _require_counts(directory, config)
    kind = config.get("model_type", "" if is_drafter else None)
    if not isinstance(kind, str):
        raise ModelUnusable(
            f"{directory}/config.json names no model_type{describe_module(directory)}"
        )
    if len(kind) > LONGEST_KIND:
        raise ModelUnusable(f"{directory}/config.json: model_type has {len(kind)} characters")
    return config, {path: header_of(path) for path in weight_files(directory)}


def require_directory(directory: Path) -> None:
    """Raise `ModelUnusable` without config.json, and for a FIFO, device, socket, or link without a
    target."""
    try:
        for path in dangling_links(directory):
            raise ModelUnusable(
                f"{path} is a link to {path.readlink()}, which is not there: download it again"
            )
        for path in directory.iterdir():
            if not is_directory(path):
                require_regular(path)
    except OSError as error:
        raise ModelUnusable(f"{directory} cannot be read: {error}") from error
    require_config(directory)


def _require_counts(directory: Path, config: Mapping[str, Any]) -> None:
    # Raise `ModelUnusable` for counts by which architectures would allocate before reading weights.
    for part in [config, *(each for each in config.values() if isinstance(each, dict))]:
        for key, value in part.items():
            maximum = next((bound for end, bound in MAXIMA.items() if key.endswith(end)), None)
            if (
                maximum is not None
                and key.startswith(("n_", "num_"))
                and isinstance(value, int)
                and value > maximum
            ):
                raise ModelUnusable(
                    f"{directory}/config.json: {key} is over {maximum}, more than any model has"
                )


def read_json(path: Path, longest_bytes: int = LONGEST_JSON_BYTES) -> dict[str, Any]:
    """Raises `ModelUnusable`."""
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
        require_content(path)
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
    index is missing. An index without any present file is ignored."""
    present = sorted(directory.glob("model*.safetensors"))
    promised = _indexed(directory) or _numbered(path.name for path in present)
    missing = sorted(promised - {path.name for path in present})
    if not present:
        raise ModelUnusable(
            name_content(directory)
            or f"{directory} has no weights (model*.safetensors): download it again"
        )
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


def _numbered(names: Iterable[str]) -> set[str]:
    # All files of the sets of which some are there.
    promised: set[str] = set()
    for name in names:
        if (match := SHARD.fullmatch(name)) is None:
            return set()
        width, count = len(match["number"]), match["count"]
        promised |= {
            f"{match['name']}-{number:0{width}}-of-{count}.safetensors"
            for number in range(1, int(count) + 1)
        }
    return promised


def unnamed_files(directory: Path) -> list[str]:
    present = {path.name for path in directory.glob("model*.safetensors")}
    promised = _indexed(directory)
    return sorted(present - promised) if promised and promised <= present else []


def quantized_by(config: Mapping[str, Any]) -> str:
    """The method of foreign checkpoints; "" for none."""
    quantization = section(config, "quantization_config") or _of_text(config)
    return str(quantization.get("quant_method", ""))


class Tensor(msgspec.Struct, frozen=True):
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
    except OSError as error:
        raise ModelUnusable(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelUnusable(f"{path} is not a safetensors file: {error}") from error
    require_content(path)
    raise ModelUnusable(f"{path} is truncated ({size} bytes): download it again")


def _require_sound(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ModelUnusable` where shapes and bytes differ, or tensors share bytes."""
    # Otherwise a small file would take any memory.
    for name, tensor in tensors.items():
        begin, end = tensor.data_offsets
        item = DTYPE_BYTES.get(tensor.dtype)
        sizes = tensor.shape
        if len(sizes) > MAX_AXES or not all(0 <= size <= LARGEST_DIMENSION for size in sizes):
            raise ModelUnusable(f"{path}: {name} has a shape that no tensor has")
        has_no_extent = begin < 0 or end < begin
        has_other_size = item and item * math.prod(sizes) != end - begin
        if has_no_extent or has_other_size:
            raise ModelUnusable(f"{path}: {name} does not have the bytes of its shape")
    spans = sorted(tensor.data_offsets for tensor in tensors.values())
    if any(after[0] < before[1] for before, after in pairwise(spans)):
        raise ModelUnusable(f"{path} has tensors that share bytes")


def tensors_of(headers: Iterable[Header]) -> dict[str, Any]:
    return {name: tensor for header in headers for name, tensor in header.items()}


def stored_bytes(tensors: dict[str, Any]) -> int:
    return sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in tensors.values())


def float32_bytes(tensors: dict[str, Any], config: dict[str, Any]) -> int:
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
