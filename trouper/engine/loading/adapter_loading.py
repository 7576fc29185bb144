"""Adapters of a model (--adapter): found before weights are read, installed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
from mlx import nn

from trouper.engine.distributed.rank_group import RankGroup
from trouper.engine.loading.adapter_files import (
    FUSE,
    FoundAdapter,
    find_adapter,
    read_adapter,
    require_finite,
)
from trouper.engine.loading.checkpoint import Checkpoint, require_memory
from trouper.engine.lora.lora_layers import (
    LowRank,
    adapted_layers,
    adapter_bytes,
    bytes_to_install,
    install,
    layers_not_reached,
)
from trouper.engine.platform.error_text import line_of
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.model import AdapterCard
from trouper.protocol.problems import ModelUnusable
from trouper.storage.cache_fingerprint import file_digest, namespace


def find_adapters(adapters: Mapping[str, str], group: RankGroup) -> list[FoundAdapter]:
    """Raises `ModelUnusable`."""
    if adapters and group.size > 1:
        raise ModelUnusable(
            "--adapter is for one rank: a model that is split over several has no adapters by "
            "request",
            "serve one adapter for all requests with --adapter-path, or use one rank",
        )
    return [find_adapter(name, path) for name, path in adapters.items()]


def read_adapters(
    found: Sequence[FoundAdapter], model: nn.Module, target: Checkpoint
) -> Sequence[Mapping[str, LowRank]]:
    """Read lazily, before the model's weights. Raises `ModelUnusable`, also for lack of memory."""
    read = [read_adapter(adapter, model) for adapter in found]
    if read:
        needed_bytes = target.loaded_bytes + bytes_to_install(model, read)
        require_memory(needed_bytes, target.directory, what="its weights and adapters")
    return read


def load_adapters(
    found: Sequence[FoundAdapter],
    read: Sequence[Mapping[str, LowRank]],
    model: nn.Module,
    report: Callable[[str], None],
) -> tuple[AdapterCard, ...]:
    """Install adapters, from index 1 on. Raises `ModelUnusable`."""
    if not found:
        return ()
    for adapter, parts in zip(found, read, strict=True):
        for path, part in parts.items():
            require_finite(adapter, path, part)
    try:
        install(model, read)
    except Exception as error:  # MLX raises various exceptions for lack of memory.
        raise ModelUnusable(
            f"--adapter: the model cannot be given its adapters: {line_of(error)}"
        ) from error
    cards = tuple(
        AdapterCard(
            name=adapter.name,
            directory=str(adapter.directory),
            rank=max(part.a.shape[1] for part in parts.values()),
            fingerprint=fingerprint_of(adapter),
        )
        for adapter, parts in zip(found, read, strict=True)
    )
    ranks = ", ".join(f"{card.name} (rank {card.rank})" for card in cards)
    report(
        f"adapters: {ranks}; {adapter_bytes(model) / 2**20:.0f} MiB in "
        f"{len(adapted_layers(model))} layers"
    )
    return cards


def require_applied(model: nn.Module, capabilities: Capabilities, head: nn.Module | None) -> None:
    """Check that passes reach every adapted layer. `head`: what reads the output layer outside of
    passes. Raises `ModelUnusable`."""
    layers = adapted_layers(model)
    outside = [path for path in layers if "layers." not in path]
    if head is not None and outside:
        raise ModelUnusable(
            f"--adapter adapts {outside[0]}, which the model's MTP head or drafter shares",
            "give --speculation ngram, or off",
        )
    try:
        not_reached = (
            layers_not_reached(model, 2 if capabilities.allows("batch") else 1) if layers else []
        )
        missed = [path for path in not_reached if mx.any(layers[path].adapters.b).item()]
    except Exception as error:
        # An architecture's code may raise any exception.
        raise ModelUnusable(
            f"--adapter: this model cannot run with adapters by request: {line_of(error)}", FUSE
        ) from error
    if missed:
        raise ModelUnusable(
            f"--adapter: the model does not call its layer {missed[0]}, which is adapted", FUSE
        )


def fingerprint_of(adapter: FoundAdapter) -> str:
    """Hash the files, which KV depends on. Raises `ModelUnusable`."""
    try:
        return namespace({path.name: file_digest(path, None) for path in adapter.files})
    except OSError as error:
        raise adapter.unusable(f"its files cannot be read again: {line_of(error)}") from error
