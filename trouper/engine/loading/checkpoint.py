"""Checks of a model directory before MLX maps a byte: MLX's errors come late, and a truncated file
may end the process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from xxhash import xxh3_64

from trouper.engine.architectures.architecture_lookup import Architecture, find_architecture
from trouper.engine.distributed.rank_group import ALONE, RankGroup
from trouper.engine.platform import device
from trouper.protocol.paths import is_directory
from trouper.protocol.problems import ModelUnusable
from trouper.storage.checkpoint_files import (
    float32_bytes,
    header_of,
    read_json,
    require_config,
    require_regular,
    stored_bytes,
    tensors_of,
    weight_files,
)

MAXIMA = {"layer": 2048, "layers": 2048, "loops": 2048, "experts": 2**16, "groups": 2**16}
"""By suffix of the config key. The largest models have 130 layers."""
LONGEST_KIND = 200
SAMPLE_BYTES = 2**16


@attrs.frozen
class Checkpoint:
    directory: Path
    config: dict[str, Any]
    stored_bytes: int
    float32_bytes: int
    """In float32."""
    digest: int
    """63-bit hash of config, shapes and sampled weights, for ranks to compare."""
    source: Architecture

    @property
    def architecture(self) -> str:
        return str(self.config["model_type"])

    @property
    def loaded_bytes(self) -> int:
        """In the device's dtype (see `precision`)."""
        return self.float32_bytes if device.is_cpu() else self.stored_bytes


def inspect(directory: Path) -> Checkpoint:
    """Raises `ModelUnusable`."""
    _require_files(directory)
    require_config(directory)
    config = read_json(directory / "config.json")
    _require_counts(directory, config)
    source = _supported(directory, config)
    files = weight_files(directory)
    headers = [header_of(path) for path in files]
    tensors = tensors_of(headers)
    return Checkpoint(
        directory,
        config,
        stored_bytes=stored_bytes(tensors),
        float32_bytes=float32_bytes(tensors, config),
        digest=_digest(config, headers, files),
        source=source,
    )


def _require_files(directory: Path) -> None:
    """Raises `ModelUnusable` for a FIFO, device or socket."""
    try:
        for path in directory.iterdir():
            if not is_directory(path):
                require_regular(path)
    except OSError as error:
        raise ModelUnusable(f"{directory} cannot be read: {error}") from error


def _require_counts(directory: Path, config: Mapping[str, Any]) -> None:
    """Architectures allocate by counts before reading weights. Raises `ModelUnusable`."""
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


def require_memory(
    needed_bytes: int, directory: Path, group: RankGroup = ALONE, *, what: str = "its weights"
) -> None:
    """`needed_bytes`: size of `what`, of which each rank keeps a part. Raises `ModelUnusable`."""
    needed, limit = needed_bytes // group.size, device.memory_limit_bytes(group.sharers)
    if needed > limit:
        weights = what if group.size == 1 else f"one of {group.size} parts of its weights"
        raise ModelUnusable(
            f"{directory} needs {needed / 2**30:.1f} GiB for {weights}, and {device.name()} has "
            f"{limit / 2**30:.1f} GiB for it: use a smaller or a quantized model, or end other "
            "programs that use the device"
        )


def _digest(config: dict[str, Any], headers: list[dict[str, Any]], files: list[Path]) -> int:
    """Sampled: reading all weights would take as long as loading."""
    digest = xxh3_64(json.dumps([config, headers], sort_keys=True).encode())
    for path in files:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - SAMPLE_BYTES))
            digest.update(file.read())
    return digest.intdigest() >> 1


def _supported(directory: Path, config: dict[str, Any]) -> Architecture:
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelUnusable(f"{directory}/config.json names no model_type")
    if len(kind) > LONGEST_KIND:
        raise ModelUnusable(f"{directory}/config.json: model_type has {len(kind)} characters")
    try:
        return find_architecture(config)
    except ModelUnusable as error:
        raise ModelUnusable(f"{directory}: {error.message}", error.remedy) from error
