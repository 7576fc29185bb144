"""Which models may share a forward pass among rows, and how. What mlx-lm's models need is known here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from trouper.engine.adaptations import adapted
from trouper.engine.chunked import ChunkSlots
from trouper.engine.quantized import KvFormat, OpenQuantizedSlots, QuantizedSlots
from trouper.engine.slots import FullSlots, OpenSlots, RingSlots
from trouper.engine.states import StateSlots


class ListSlots:
    """The counterpart of mlx-lm's CacheList: several caches of one layer."""

    def __init__(self, *caches: Any) -> None:
        self.caches = caches

    def __getitem__(self, place: int) -> Any:
        return view(self.caches[place])


def view(cache: Any) -> Any:
    """What the model is given for this cache: recurrent state goes as mlx-lm's own ArraysCache."""
    return cache.view if isinstance(cache, StateSlots) else cache


@attrs.frozen
class Batching:
    """How rows of a model share a step. `reason` is "" when they do."""

    together: bool
    prefill_together: bool
    reason: str = ""

    @property
    def no_drafts(self) -> str:
        """Why rows cannot draft tokens and take wrong ones back; "" if they can."""
        if not self.together:
            return self.description
        return "" if self.prefill_together else "recurrent state cannot be taken back"

    @property
    def description(self) -> str:
        if not self.together:
            return f"row by row ({self.reason})"
        return "batched" if self.prefill_together else "batched, prompts prefill one by one (recurrent state)"


def batching_of(model: nn.Module) -> Batching:
    """Decide from the caches that the model itself makes."""
    kinds = {type(cache) for cache in flatten(make_prompt_cache(model))}
    found = adapted(model)
    unknown = kinds - {KVCache, RotatingKVCache, ArraysCache, *([ChunkedKVCache] if found.chunked else [])}
    if unknown:
        return Batching(False, False, f"cache {', '.join(sorted(kind.__name__ for kind in unknown))}")
    if found.alone:
        return Batching(False, False, found.alone)
    return Batching(True, ArraysCache not in kinds)


def flatten(caches: Sequence[Any]) -> list[Any]:
    """Nested caches, one by one."""
    return [
        leaf
        for cache in caches
        for leaf in (flatten(cache.caches) if isinstance(cache, CacheList | ListSlots) else [cache])
    ]


def slot_caches(model: nn.Module, kv: KvFormat, slack: int = 0) -> list[Any]:
    """One slot cache for each cache that the model makes for a single row. Rings and states are bounded, and are
    never quantized. `slack`: tokens that a ring holds beyond its window."""
    found = adapted(model)
    traits = found.traits
    full, quantized = (OpenSlots, OpenQuantizedSlots) if traits.open_buffers else (FullSlots, QuantizedSlots)

    def counterpart(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return ListSlots(*map(counterpart, cache.caches))
        if isinstance(cache, ArraysCache):
            return StateSlots(len(cache.cache), found.history)
        if isinstance(cache, ChunkedKVCache):
            return ChunkSlots(traits)
        if isinstance(cache, RotatingKVCache):
            return RingSlots(cache.max_size, slack, traits)
        return quantized(kv, traits) if kv.bits else full(traits)

    return [counterpart(cache) for cache in make_prompt_cache(model)]
