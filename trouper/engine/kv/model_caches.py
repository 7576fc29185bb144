"""Slot caches for mlx-lm's models, and the models whose rows may share a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.adaptations.row_offsets import Traits
from trouper.engine.kv.full_slots import ChunkSlots, FullSlots, OpenSlots
from trouper.engine.kv.quantized_kv import PLAIN, KvFormat, OpenQuantizedSlots, QuantizedSlots
from trouper.engine.kv.recorded_calls import layers_with_cache, recorded_calls
from trouper.engine.kv.recurrent_state import StateSlots
from trouper.engine.kv.ring_slots import RingSlots
from trouper.engine.passes.region import Region
from trouper.engine.platform.error_text import line_of
from trouper.protocol.capabilities import Capabilities

# Cache classes of other packages that behave as mlx-lm's, and hence may have slots.
_ALIKE: dict[type, type] = {}


def treat_alike(kind: type, counterpart: type) -> None:
    """Give a class the slots of mlx-lm's `counterpart`. The self-check finds wrong answers."""
    _ALIKE[kind] = counterpart


def kind_of(cache: Any) -> type:
    """The class of a cache, or the counterpart in mlx-lm."""
    return _ALIKE.get(type(cache), type(cache))


class ListSlots:
    """Counterpart of mlx-lm's CacheList."""

    def __init__(self, *caches: Any) -> None:
        self.caches = caches

    def __getitem__(self, index: int) -> Any:
        return view(self.caches[index])


def view(cache: Any) -> Any:
    """The model's view of this cache: for recurrent state an ArraysCache."""
    return cache.view if isinstance(cache, StateSlots) else cache


def guess_batching(model: nn.Module) -> Capabilities:
    """Guess capabilities from cache types, and from building a pass of two rows. Evaluates
    nothing."""
    found = by_caches(model)
    if not found.allows("batch"):
        return found
    caches = slot_caches(model, PLAIN)
    states = [leaf for leaf in flatten(caches) if isinstance(leaf, StateSlots)]
    lengths = np.array([0] if states else [0, 3], np.int32)
    region = Region(0, lengths, np.full(len(lengths), 2, np.int32), 2)
    begin(caches, region)
    for leaf in states:
        leaf.view.calls = []
    with recorded_calls(layers_with_cache(model) if states else []):
        reason = pass_fault(model, caches, region)
    if reason:
        return Capabilities(batch=f"a pass over slots cannot be built: {reason}")
    if not all(leaf.view.calls for leaf in states):
        return found.without(
            "drafts", "its recurrent state changes outside of modules that get a cache"
        )
    return found


def begin(caches: Sequence[Any], region: Region, *, prefilling: bool = True) -> None:
    """Set the slots of a pass that is only built. `prefilling`: of one new row with own states;
    else of decoding rows, which share states."""
    for leaf in flatten(caches):
        if not isinstance(leaf, StateSlots):
            leaf.begin(region)
        elif prefilling:
            leaf.open()
            leaf.begin(0)
        else:
            leaf.begin()


def build_pass(model: nn.Module, caches: Sequence[Any], region: Region) -> None:
    """Build a pass over begun caches, which gives the buffers shapes. Evaluates nothing."""
    with adapted(model).during(region):
        model(
            mx.ones((len(region.lengths), region.width), mx.int32),
            cache=[view(cache) for cache in caches],
        )


def pass_fault(model: nn.Module, caches: Sequence[Any], region: Region) -> str:
    """Why a pass over begun caches cannot be built, or ""."""
    try:
        build_pass(model, caches, region)
    except Exception as error:  # noqa: BLE001
        # Any architecture's code over caches that are not mlx-lm's: it is the answer.
        return line_of(error)
    return ""


def by_caches(model: nn.Module) -> Capabilities:
    """Guess capabilities from the types of the model's caches: some types have slots."""
    kinds = {kind_of(cache) for cache in flatten(make_prompt_cache(model))}
    found = adapted(model)
    unknown = kinds - {
        KVCache,
        RotatingKVCache,
        ArraysCache,
        *([ChunkedKVCache] if found.chunked else []),
    }
    if unknown:
        return Capabilities(batch=f"cache {', '.join(sorted(kind.__name__ for kind in unknown))}")
    if found.alone:
        return Capabilities(batch=found.alone)
    if ArraysCache in kinds:
        return Capabilities(prefill_together="recurrent state")
    return Capabilities()


def flatten(caches: Sequence[Any]) -> list[Any]:
    return [
        leaf for cache in caches for leaf in (flatten(cache.caches) if _is_list(cache) else [cache])
    ]


def _is_list(cache: Any) -> bool:
    return isinstance(cache, ListSlots) or issubclass(kind_of(cache), CacheList)


def state_slots(model: nn.Module) -> list[StateSlots]:
    history = adapted(model).history
    caches = flatten(make_prompt_cache(model))
    return [
        StateSlots(len(cache.cache), history)
        for cache in caches
        if issubclass(kind_of(cache), ArraysCache)
    ]


def slot_caches(
    model: nn.Module, kv: KvFormat, slack: int = 0, states: Sequence[StateSlots] | None = None
) -> list[Any]:
    """One slot cache for each of the model's caches; `states` replace recurrent ones. Rings and
    states are bounded and never quantized. `slack`: tokens that a ring holds beyond the window."""
    following = iter(state_slots(model) if states is None else states)
    make = partial(_slots_of, traits=adapted(model).traits, kv=kv, slack=slack, states=following)
    return [make(cache) for cache in make_prompt_cache(model)]


def _slots_of(
    cache: Any, traits: Traits, kv: KvFormat, slack: int, states: Iterator[StateSlots]
) -> Any:
    # No function inside another that calls itself: it would refer to itself, and the collector
    # alone would free the states.
    if _is_list(cache):
        return ListSlots(*(_slots_of(part, traits, kv, slack, states) for part in cache.caches))
    kind = kind_of(cache)
    if issubclass(kind, ArraysCache):
        return next(states)
    if issubclass(kind, ChunkedKVCache):
        return ChunkSlots(traits)
    if issubclass(kind, RotatingKVCache):
        return RingSlots(cache.max_size, slack, traits)
    full, quantized = (
        (OpenSlots, OpenQuantizedSlots) if traits.open_buffers else (FullSlots, QuantizedSlots)
    )
    return quantized(kv, traits) if kv.bits else full(traits)
