"""Checks of a model directory before MLX maps a byte: a truncated file may end the process."""

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
from trouper.protocol.problems import ModelUnusable
from trouper.storage.checkpoint_files import (
    Header,
    float32_bytes,
    read_checkpoint,
    stored_bytes,
    tensors_of,
)

SAMPLE_BYTES = 2**16


@attrs.frozen
class StoredWeights:
    directory: Path
    config: dict[str, Any]
    stored_bytes: int
    float32_bytes: int
    digest: int
    """63-bit hash of config, shapes and sampled weights, for ranks to compare."""

    @property
    def loaded_bytes(self) -> int:
        """In the device's dtype (see `precision`)."""
        return self.float32_bytes if device.is_cpu() else self.stored_bytes


@attrs.frozen
class Checkpoint(StoredWeights):
    source: Architecture
    generation_config: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.config["model_type"])


def inspect(directory: Path) -> Checkpoint:
    """Raises `ModelUnusable`."""
    config, headers = read_checkpoint(directory)
    source = _supported(directory, config)
    return Checkpoint(directory, config, **_counts(config, headers), source=source)


def inspect_drafter(directory: Path) -> StoredWeights:
    """Inspect what drafts by the hidden states of another model. Raises `ModelUnusable`."""
    config, headers = read_checkpoint(directory, is_drafter=True)
    return StoredWeights(directory, config, **_counts(config, headers))


def _counts(config: dict[str, Any], headers: Mapping[Path, Header]) -> dict[str, Any]:
    tensors = tensors_of(headers.values())
    return {
        "stored_bytes": stored_bytes(tensors),
        "float32_bytes": float32_bytes(tensors, config),
        "digest": _digest(config, headers),
    }


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


def _digest(config: dict[str, Any], headers: Mapping[Path, Header]) -> int:
    # Sampled: reading all weights would take as long as loading.
    digest = xxh3_64(json.dumps([config, [*headers.values()]], sort_keys=True).encode())
    for path in headers:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - SAMPLE_BYTES))
            digest.update(file.read())
    return digest.intdigest() >> 1


def _supported(directory: Path, config: dict[str, Any]) -> Architecture:
    try:
        return find_architecture(config)
    except ModelUnusable as error:
        raise ModelUnusable(f"{directory}: {error.message}", error.remedy) from error
