"""Checks whether a directory holds a model that can be loaded, before MLX maps a byte of it.

MLX's own errors are raised late, and a truncated file may even end the process. Headers of
safetensors are small and contain all that is needed: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
from mlx_lm.utils import MODEL_REMAPPING
from xxhash import xxh3_64

from trouper.engine.distributed.rank_group import ALONE, RankGroup
from trouper.engine.platform import device
from trouper.protocol.problems import ModelUnusable

PACKED = ("U32", "I32")
"""Dtypes of packed quantized weights; each layer has its own number of bits."""
LONGEST_HEADER_BYTES = 100_000_000
SAMPLE_BYTES = 2**16
"""Number of bytes from the end of each file that the digest samples."""


@attrs.frozen
class Checkpoint:
    """A checked directory: its config as written, and the size of its tensors."""

    directory: Path
    config: dict[str, Any]
    stored_bytes: int
    """Bytes of all tensors in the dtypes that they are stored in."""
    float32_bytes: int
    """Bytes of all tensors after they are converted to float32."""
    digest: int
    """63-bit hash of config, shapes and a sample of the weights, by which ranks check that they have the same model."""

    @property
    def architecture(self) -> str:
        """The config's model_type."""
        return str(self.config["model_type"])

    @property
    def loaded_bytes(self) -> int:
        """Bytes of all tensors in the dtype that this device computes in (see `precision`)."""
        return self.float32_bytes if device.is_cpu() else self.stored_bytes


def inspect(directory: Path) -> Checkpoint:
    """Check a directory. Raises `ModelUnusable`, naming what is missing, truncated or not supported."""
    config = read_json(directory / "config.json")
    _require_supported(directory, config)
    files = _weight_files(directory)
    group_size = (config.get("quantization") or {}).get("group_size", 64)
    headers = [_header(path) for path in files]
    tensors = {name: tensor for header in headers for name, tensor in header.items() if name != "__metadata__"}
    return Checkpoint(
        directory,
        config,
        stored_bytes=sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in tensors.values()),
        float32_bytes=sum(_float32_bytes(name, tensor, group_size) for name, tensor in tensors.items()),
        digest=_digest(config, headers, files),
    )


def require_memory(needed_bytes: int, directory: Path, group: RankGroup = ALONE) -> None:
    """Check that the weights fit into memory. `needed_bytes`: size of the whole model, of which each rank keeps its part. Raises
    `ModelUnusable`."""
    needed, limit = needed_bytes // group.size, device.memory_limit_bytes(group.sharers)
    if needed > limit:
        weights = "its weights" if group.size == 1 else f"one of {group.size} parts of its weights"
        raise ModelUnusable(
            f"{directory} needs {needed / 2**30:.1f} GiB for {weights}, and {device.name()} has "
            f"{limit / 2**30:.1f} GiB: use a smaller or a quantized model"
        )


def _digest(config: dict[str, Any], headers: list[dict[str, Any]], files: list[Path]) -> int:
    """Hash config, headers and a sample of each file, since reading all weights would take as long as loading them."""
    digest = xxh3_64(json.dumps([config, headers], sort_keys=True).encode())
    for path in files:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - SAMPLE_BYTES))
            digest.update(file.read())
    return digest.intdigest() >> 1


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


def _require_supported(directory: Path, config: dict[str, Any]) -> None:
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelUnusable(f"{directory}/config.json names no model_type")
    module = MODEL_REMAPPING.get(kind, kind)
    if not module.isidentifier() or find_spec(f"mlx_lm.models.{module}") is None:
        raise ModelUnusable(f"{directory} is of model_type {kind!r}, which this version of mlx-lm does not support")


def _weight_files(directory: Path) -> list[Path]:
    """List the files that mlx-lm loads. Raises `ModelUnusable` if one that the index of a sharded checkpoint names is missing."""
    present = sorted(directory.glob("model*.safetensors"))
    index = directory / "model.safetensors.index.json"
    promised = set(read_json(index).get("weight_map", {}).values()) if index.exists() else set()
    missing = sorted(promised - {path.name for path in present})
    if missing or not present:
        what = ", ".join(missing) or "weights (model*.safetensors)"
        raise ModelUnusable(f"{directory} has no {what}: download it again, or convert it by `mlx_lm.convert`")
    return present


def _header(path: Path) -> dict[str, Any]:
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


def _float32_bytes(name: str, tensor: dict[str, Any], group_size: int) -> int:
    """Compute a tensor's share of the float32 size. A quantized weight has `group_size` values for each of its scales; packed
    values and biases count as 0."""
    if tensor["dtype"] in PACKED or name.endswith(".biases"):
        return 0
    values = math.prod(tensor["shape"])
    return 4 * values * (group_size if name.endswith(".scales") else 1)
