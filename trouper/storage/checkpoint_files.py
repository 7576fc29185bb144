"""The files of a checkpoint: its config, and the headers of its weights, which say each tensor's shape and dtype.

Headers of safetensors are small and contain all that is needed: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trouper.protocol.problems import ModelUnusable

PACKED = ("U32", "I32")
"""Dtypes of packed quantized weights; each layer has its own number of bits."""
LONGEST_HEADER_BYTES = 100_000_000
GROUP_SIZE = 64
"""Values for each scale of a quantized config that does not say."""
Header = dict[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `ModelUnusable` if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelUnusable(f"{path.parent} has no {path.name}: it is not a model directory") from None
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnusable(f"{path} is not a JSON object")
    return content


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Part of a config; empty if there is none, or if it is no JSON object."""
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def weight_files(directory: Path) -> list[Path]:
    """List the files that mlx-lm loads. Raises `ModelUnusable` if one that the index of a sharded checkpoint names is missing."""
    present = sorted(directory.glob("model*.safetensors"))
    index = directory / "model.safetensors.index.json"
    promised = (
        {str(name) for name in section(read_json(index), "weight_map").values()} if index.exists() else set[str]()
    )
    missing = sorted(promised - {path.name for path in present})
    if missing or not present:
        what = ", ".join(missing) or "weights (model*.safetensors)"
        raise ModelUnusable(f"{directory} has no {what}: download it again, or convert it by `mlx_lm.convert`")
    return present


def header_of(path: Path) -> Header:
    """Read the header of a safetensors file. Raises `ModelUnusable` if the file is none, or shorter than its header says."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 8 + length <= min(size, LONGEST_HEADER_BYTES) else None
        if isinstance(header, dict):
            end = max(
                (tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0
            )
            if size >= 8 + length + end:
                return header
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelUnusable(f"{path} is not a safetensors file: {error}") from error
    raise ModelUnusable(f"{path} is truncated ({size} bytes): download it again")


def tensors_of(headers: Iterable[Header]) -> dict[str, Any]:
    """All tensors of a checkpoint, by name."""
    return {name: tensor for header in headers for name, tensor in header.items() if name != "__metadata__"}


def stored_bytes(tensors: dict[str, Any]) -> int:
    """Bytes of all tensors in the dtypes that they are stored in."""
    return sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in tensors.values())


def float32_bytes(tensors: dict[str, Any], config: dict[str, Any]) -> int:
    """Bytes of all tensors after they are converted to float32."""
    group_size = section(config, "quantization").get("group_size", GROUP_SIZE)
    return sum(_float32_bytes(name, tensor, group_size) for name, tensor in tensors.items())


def _float32_bytes(name: str, tensor: dict[str, Any], group_size: int) -> int:
    """Compute a tensor's share of the float32 size. A quantized weight has `group_size` values for each of its scales; packed
    values and biases count as 0."""
    if tensor["dtype"] in PACKED or name.endswith(".biases"):
        return 0
    values: int = math.prod(tensor["shape"])
    return 4 * values * (int(group_size) if name.endswith(".scales") else 1)
