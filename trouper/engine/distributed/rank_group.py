"""The ranks of one model and MLX's collectives, free with one rank."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from xxhash import xxh3_64_intdigest

from trouper.process import backend_of
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings

log = logging.getLogger("trouper.engine")

# Ranks of one host with different visible devices share no memory.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


# Collectives cannot be cancelled, and every rank must start the same ones in the same order: plans
# alone may decide (docs/ranks.md). `mx.distributed.init` holds the GIL while waiting (MLX 0.32.4).
class RankGroup:
    """Lives on the engine's thread."""

    def __init__(self, group: mx.distributed.Group | None = None) -> None:
        self._group = group
        self.rank: int = group.rank() if group is not None else 0
        self.size: int = group.size() if group is not None else 1
        self.sharers = self._sharers()
        """Ranks in this rank's memory."""

    @property
    def mlx(self) -> mx.distributed.Group:
        """None for a single rank."""
        assert self._group is not None, "there is no group of one"
        return self._group

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(self, tokens: mx.array) -> mx.array:
        """Return rank 0's tokens, lazily (F21)."""
        if self.size == 1:
            return tokens
        return self.sum(tokens if self.leads else tokens * 0)

    def sum(self, part: mx.array) -> mx.array:
        """Lazy."""
        return part if self.size == 1 else mx.distributed.all_sum(part, group=self._group)

    def share(self, data: bytes) -> bytes:
        if self.size == 1:
            return data
        payload = data if self.leads else b""
        room = np.zeros(max(self.gather(len(payload))), np.uint8)
        room[: len(payload)] = np.frombuffer(payload, np.uint8)
        return np.array(self.sum(mx.array(room))).tobytes()

    def gather(self, number: int) -> list[int]:
        """Gather 63-bit numbers in order of ranks. Waits for all ranks."""
        numbers_by_rank = [number if rank == self.rank else 0 for rank in range(self.size)]
        gathered = self.sum(mx.array(numbers_by_rank, mx.int64))
        numbers: list[int] = gathered.tolist()  # type: ignore[assignment]
        return numbers

    def _sharers(self) -> int:
        location = f"{socket.gethostname()} {os.environ.get(VISIBLE_DEVICES, '')}"
        location_hash = xxh3_64_intdigest(location.encode()) >> 1
        return self.gather(location_hash).count(location_hash)


ALONE = RankGroup()
OF_RANKS: dict[str, Any] = {"pipeline": False, "tp_reduce_dtype": "native"}
"""Settings of several ranks, and what one rank has."""


def split_settings(settings: Settings, group: RankGroup) -> Settings:
    """Return the settings, without those of several ranks, which are named, if there is one."""
    wished = [name for name, usual in OF_RANKS.items() if getattr(settings, name) != usual]
    if group.size > 1 or not wished:
        return settings
    flags = " and ".join("--" + name.replace("_", "-") for name in wished)
    log.warning("%s has no effect: there is one rank (`trouper launch` starts several)", flags)
    return attrs.evolve(settings, **OF_RANKS)


def join() -> RankGroup:
    """Waits for all ranks. Raises `ModelUnusable`."""
    backend = backend_of(os.environ)
    if backend is None:
        return ALONE
    try:
        return RankGroup(mx.distributed.init(strict=True, backend=backend))
    except (RuntimeError, ValueError) as error:
        raise ModelUnusable(f"this rank cannot join the others by {backend}: {error}") from error
