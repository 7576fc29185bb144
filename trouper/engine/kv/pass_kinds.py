"""Kinds of passes that may be compiled.

Traced regions have arrays alone: windows, rings with drafts and masks fail there, and run
uncompiled.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import attrs
import mlx.core as mx

from trouper.engine.kv.buffer_shapes import BankCaches
from trouper.engine.kv.slot_cache import SlotCache
from trouper.engine.passes.region import ADAPTERS, Name, Region


class Untraceable(Exception):
    """The pass depends on more than arrays."""


class PartialRegion(Region):
    """Without values that differ within a kind."""

    def __getattr__(self, name: str) -> Any:
        """Called for absent attributes."""
        raise Untraceable(f"the pass reads {name} of its rows")


class TracedRegion(PartialRegion):
    """Arrays are inputs; the host has no lengths."""

    def __init__(self, traced: Region, arrays: dict[Name, mx.array]) -> None:
        self.start, self.stop, self.width, self.room = 0, traced.stop, traced.width, 0
        self.level = self.causal = self.copied = False
        self.singly, self.by_length = traced.singly, True
        self._flat_indices = {
            name: array for name, array in arrays.items() if isinstance(name, tuple)
        }
        self.__dict__ |= {
            name: array
            for name, array in arrays.items()
            if isinstance(name, str) and name != ADAPTERS
        }
        self.adapters = (
            None if traced.adapters is None else traced.adapters.traced(arrays[ADAPTERS])
        )


class TracedPrompt(PartialRegion):
    """The first pass over a prompt, without its number of tokens."""

    def __init__(self, traced: Region) -> None:
        self.__dict__ |= traced.__dict__
        del self.__dict__["counts"]


@attrs.frozen(eq=False)
class Pass:
    """`regions`: of each bank, then of all rows if several. `banks`: the caches of each."""

    keeps_shapes: ClassVar[bool]
    """Whether buffers keep shapes."""
    regions: Sequence[Region]
    banks: Sequence[BankCaches]

    @property
    def kind(self) -> Hashable:
        """Equal for passes with one compiled function."""
        raise NotImplementedError

    @property
    def traceable(self) -> bool:
        """Whether the pass depends on arrays alone."""
        raise NotImplementedError

    def inputs(self) -> list[list[Name]]:
        """Names of arrays that the pass has read, by region."""
        raise NotImplementedError

    def traced_regions(self, arrays: Sequence[dict[Name, mx.array]]) -> Sequence[Region]:
        """`arrays`: of each region."""
        raise NotImplementedError

    @property
    def caches(self) -> Sequence[SlotCache]:
        """Of all banks."""
        first, *others = self.banks
        return (
            [*first.leaves, *(leaf for bank in others for leaf in bank.leaves)]
            if others
            else first.leaves
        )

    def put(self, buffers: Sequence[list[mx.array]]) -> None:
        for leaf, parts in zip(self.caches, buffers, strict=True):
            leaf.buffers = parts


class DecodePass(Pass):
    """Decoding rows; or chunks of prompts, never compiled."""

    keeps_shapes = True

    @property
    def kind(self) -> Hashable:
        shapes = (bank.held() for bank in self.banks)
        adapters = self.regions[-1].adapters
        adapted = () if adapters is None else ("adapters", adapters.version)
        return (*(region.stop for region in self.regions), self.regions[0].width, *shapes, *adapted)

    @property
    def traceable(self) -> bool:
        return all(
            region.by_length and bank.held().has_room(region.stop, region.room)
            for region, bank in zip(self.regions, self.banks, strict=False)
        )

    def inputs(self) -> list[list[Name]]:
        return [region.arrays_read() for region in self.regions]

    def traced_regions(self, arrays: Sequence[dict[Name, mx.array]]) -> Sequence[Region]:
        return [
            TracedRegion(region, inputs)
            for region, inputs in zip(self.regions, arrays, strict=True)
        ]


class PromptPass(Pass):
    """A lone row's first pass, without buffers yet."""

    keeps_shapes = False

    @property
    def kind(self) -> Hashable:
        [region] = self.regions
        made = ((leaf.slots, leaf.capacity_for(region.room)) for leaf in self.caches)
        return "prompt", region.width, region.start, *made

    @property
    def traceable(self) -> bool:
        [region] = self.regions
        return (
            region.level
            and region.adapters is None
            and not any(leaf.buffers for leaf in self.caches)
        )

    def inputs(self) -> list[list[Name]]:
        return [[]]

    # It has none.
    def traced_regions(self, arrays: Sequence[dict[Name, mx.array]]) -> Sequence[Region]:  # noqa: ARG002
        return [TracedPrompt(region) for region in self.regions]
