"""Passes whose graph `mx.compile` builds once: over decoding rows, and over a lone short prompt."""

# Building a graph takes a third of a step on a fast GPU, and holds Python's lock. A pass can be
# compiled if nothing but arrays depends on the rows' lengths (`decode_attention.py`): a structure
# is the number of rows and the shapes of buffers, or a first prompt's width.
# - The first pass of a structure is ordinary and shows which arrays of regions the model reads: the
# inputs of the compiled function. The second, soon after, is compiled.
# - While tracing, regions have only arrays (`TracedRegion`). A model that needs more (a window, a
# ring with drafts, a mask) fails and runs as before.
# - The function takes and returns buffers. Any other reference to old buffers would make each write
# copy.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import attrs
import mlx.core as mx

from trouper.engine.kv.slot_cache import BankCaches, SlotCache
from trouper.engine.passes.region import ADAPTERS, Name, Region
from trouper.engine.platform.error_text import line_of


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
        self.level = self.causal = self.copied = self.tiled = False
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
    """Decoding rows; or chunks of prompts, never compiled. `regions`: of each bank, then of all
    rows if several. `banks`: the caches of each."""

    keeps_shapes: ClassVar[bool] = True
    regions: Sequence[Region]
    banks: Sequence[BankCaches]

    @property
    def kind(self) -> Hashable:
        """Equal for passes with one compiled function."""
        shapes = (bank.held() for bank in self.banks)
        adapters = self.regions[-1].adapters
        adapted = () if adapters is None else ("adapters", adapters.version)
        return (*(region.stop for region in self.regions), self.regions[0].width, *shapes, *adapted)

    @property
    def traceable(self) -> bool:
        """Whether the pass depends on arrays alone. Images differ in number and place."""
        return self.regions[-1].media is None and all(
            region.by_length and bank.held().has_room(region.stop, region.room)
            for region, bank in zip(self.regions, self.banks, strict=False)
        )

    def inputs(self) -> list[list[Name]]:
        """Names of arrays that the pass has read, by region."""
        return [region.arrays_read() for region in self.regions]

    def traced_regions(self, arrays: Sequence[dict[Name, mx.array]]) -> Sequence[Region]:
        return [
            TracedRegion(region, inputs)
            for region, inputs in zip(self.regions, arrays, strict=True)
        ]

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
            and region.media is None
        )

    def inputs(self) -> list[list[Name]]:
        return [[]]

    # It has none.
    def traced_regions(
        self,
        arrays: Sequence[dict[Name, mx.array]],  # noqa: ARG002
    ) -> Sequence[Region]:
        return [TracedPrompt(region) for region in self.regions]


# Maximum of compiled structures; a traced graph takes about 1 MB for 28 layers.
MAX_COMPILED = 48
# Maximum of structures remembered before a recurrence.
MAX_SEEN = 4
# Maximum of counted kinds of passes.
MAX_KINDS = 1024
# Passes of an ordinary kind that may take longer: kernels and plans are prepared in the first, the
# CUDA graph is made in the second.
PREPARING = 2


Build = Callable[[Sequence[Region], mx.array], Any]
"""From tokens (n, width) in the slots of these regions to the pass's arrays: logits (n, width,
vocabulary), or what a head reads."""


Traced = Callable[
    [mx.array, list[list[mx.array]], list[list[mx.array]]], tuple[Any, list[list[mx.array]]]
]
"""From tokens, arrays of regions, and buffers of caches to the pass's arrays and new buffers."""


class CompiledPasses:
    """The compiled passes of a model, and the number of passes of each kind. preparing: whether the
    device prepared something since `begin_step`, which makes durations unusual."""

    def __init__(self, *, counting: bool) -> None:
        """`counting`: whether the device prepares kernels for each kind of pass."""
        self.preparing, self._counting = False, counting
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        # By kind, least recently used first.
        self._compiled: OrderedDict[Hashable, CompiledPass] = OrderedDict()
        # Arrays read of each region by kind of the last ordinary passes, oldest first. Passes with
        # and without drafts alternate.
        self._seen: OrderedDict[Hashable, list[list[Name]]] = OrderedDict()
        self.fault = ""
        """Why the last untraceable pass could not be traced."""

    def begin_step(self) -> None:
        self.preparing = False

    def note(self, ordinary: Pass) -> None:
        """Count an ordinary pass, such as over chunks or of a row alone."""
        self.preparing |= self._counting and self._count(ordinary.kind) <= PREPARING

    def run(
        self, build: Build, model_pass: Pass, tokens: mx.array, *, may_compile: bool = True
    ) -> Any:
        """Run the pass: instantiated, compiled if a recent pass was of the same kind, or ordinary.
        The caches have new buffers afterwards."""
        if not (may_compile and model_pass.traceable):
            self.note(model_pass)
            return build(model_pass.regions, tokens)
        kind = model_pass.kind
        if (names := self._seen.pop(kind, None)) is not None:
            self._compiled[kind] = CompiledPass(names)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        compiled = self._compiled.get(kind)
        self.preparing |= self._counting and (compiled is None or names is not None)
        if compiled is not None:
            self._compiled.move_to_end(kind)
            if not compiled.fault:
                return compiled(build, model_pass, tokens)
            self.fault = compiled.fault
        logits = build(model_pass.regions, tokens)
        if compiled is None:
            self._seen[kind] = model_pass.inputs()
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
        return logits

    def _count(self, kind: Hashable) -> int:
        # Number of ordinary passes of a kind, with this one.
        self._counts[kind] = count = self._counts.pop(kind, 0) + 1
        if len(self._counts) > MAX_KINDS:
            self._counts.popitem(last=False)
        return count


class CompiledPass:
    def __init__(self, names: list[list[Name]]) -> None:
        """`names`: arrays of each region that are inputs."""
        self._names = names
        # The current call only: a kept call would keep all rows' KV.
        self._call: list[tuple[Build, Pass]] = []
        self._function = mx.compile(_traced(names, self._call))
        self.fault = ""
        """Why the pass cannot be traced; "" if traceable."""

    def __call__(self, build: Build, model_pass: Pass, tokens: mx.array) -> Any:
        """Instantiate the pass, or build an untraceable one."""
        buffers = [leaf.buffers for leaf in model_pass.caches]
        arrays = [
            [region.array(name) for name in names]
            for region, names in zip(model_pass.regions, self._names, strict=True)
        ]
        self._call.append((build, model_pass))
        try:
            logits, changed = self._function(tokens, arrays, buffers)
            was_traced = not self._call
        except Exception as error:  # noqa: BLE001
            # Any architecture's code over arrays without values: it is the answer.
            self.fault = line_of(error)
            model_pass.put(buffers)
            return build(model_pass.regions, tokens)
        finally:
            self._call.clear()
        if was_traced or not model_pass.keeps_shapes:
            model_pass.put(changed)
        else:
            for held, new in zip(buffers, changed, strict=True):
                held[:] = new  # Setting `SlotCache.buffers` would count as other shapes.
        return logits


def _traced(names: list[list[Name]], call: list[tuple[Build, Pass]]) -> Traced:
    # The traced function. A reference cycle would keep the weights, constants of the trace, until a
    # garbage collection.

    def run(
        tokens: mx.array, arrays: list[list[mx.array]], buffers: list[list[mx.array]]
    ) -> tuple[Any, list[list[mx.array]]]:
        build, model_pass = call.pop()
        model_pass.put([list(parts) for parts in buffers])
        regions = model_pass.traced_regions(
            [
                dict(zip(known, values, strict=True))
                for known, values in zip(names, arrays, strict=True)
            ]
        )
        return build(regions, tokens), [leaf.buffers for leaf in model_pass.caches]

    return run
