"""Loads and unloads LoRA adapters while rows decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import attrs
import mlx.core as mx
import trio
from mlx import nn

from trouper.engine.distributed.rank_group import RankGroup
from trouper.engine.loading.adapter_files import FoundAdapter, read_adapter, require_finite
from trouper.engine.loading.adapter_loading import find_adapters, fingerprint_of, require_applied
from trouper.engine.loading.model_loading import EvaluatedModel
from trouper.engine.lora.lora_layers import (
    LowRank,
    StackedAdapters,
    adapted_layers,
    adapter_bytes,
    dtype_of,
    part_of,
    put,
    sizes_of,
    stacked,
    stacked_bytes,
)
from trouper.engine.lora.row_adapters import current_adapters
from trouper.engine.platform.error_text import first_line_of, lacks_memory
from trouper.engine.step_loop import Pieces, SideWork
from trouper.protocol.model import AdapterCard, AdapterPlan
from trouper.protocol.problems import ModelUnusable, OutOfDeviceMemory
from trouper.protocol.settings import Settings

Names = list[str | None]
"""Adapter by slot, from 1; None: free."""


def planning(model: nn.Module, names: Names, found: FoundAdapter) -> Pieces[AdapterPlan]:
    """Compute the memory for `adding`. Evaluates nothing. Raises `ModelUnusable`."""
    parts = read_adapter(found, model)
    yield False
    slots = len(names) + (None not in names)
    total = sum(
        stacked_bytes(
            layer, slots, max(_rank(layer), parts[path].a.shape[1] if path in parts else 0)
        )
        for path, layer in _layers(model, parts).items()
    )
    read = sum(part.a.nbytes + part.b.nbytes for part in parts.values())
    return AdapterPlan(
        added_bytes=total - adapter_bytes(model), total_bytes=total, loading_bytes=total + read
    )


def adding(
    model: nn.Module, names: Names, found: FoundAdapter, check: Callable[[], None]
) -> Pieces[int]:
    """Return the greatest rank. `check` raises if the model cannot run with the adapter, which is
    then undone. Raises `ModelUnusable`."""
    parts = read_adapter(found, model)
    yield False
    for path, part in parts.items():
        mx.eval(part.a, part.b)
        require_finite(found, path, part)
        yield False
    slot = names.index(None) if None in names else len(names)
    changed: Names = [*names[:slot], found.name, *names[slot + 1 :]]
    before = {
        path: getattr(layer, "adapters", None) for path, layer in _layers(model, parts).items()
    }
    after = yield from _restacked(model, changed, slot + 1, parts)
    _exchange(model, after)
    try:
        check()
    except BaseException:
        _exchange(model, before)
        raise
    names[:] = changed
    return max(part.a.shape[1] for part in parts.values())


def removing(model: nn.Module, names: Names, name: str) -> Pieces[None]:
    slot = names.index(name)
    while current_adapters(model).is_used(slot + 1):
        yield True
    changed: Names = [*names[:slot], None, *names[slot + 1 :]]
    while changed and changed[-1] is None:
        changed.pop()
    after = yield from _restacked(model, changed, slot + 1, {})
    _exchange(model, after)
    names[:] = changed


def _rank(layer: Any) -> int:
    found: StackedAdapters | None = getattr(layer, "adapters", None)
    return 0 if found is None else max(found.ranks)


def _layers(model: nn.Module, parts: Mapping[str, LowRank]) -> dict[str, Any]:
    """Layers with adapters, now or afterwards, by path."""
    modules = dict(model.named_modules())
    return {path: modules[path] for path in dict.fromkeys([*adapted_layers(model), *parts])}


def _restacked(
    model: nn.Module, names: Names, slot: int, new: Mapping[str, LowRank]
) -> Pieces[dict[str, StackedAdapters | None]]:
    """Compute all layers' matrices, with `new` in `slot`; None for a layer without adapters."""
    after: dict[str, StackedAdapters | None] = {}
    for path, layer in _layers(model, new).items():
        parts = [
            new.get(path) if index == slot else part_of(layer, index)
            for index in range(1, len(names) + 1)
        ]
        after[path] = None
        if any(part is not None for part in parts):
            after[path] = made = stacked(
                current_adapters(model), parts, sizes_of(layer), dtype_of(layer)
            )
            mx.eval(made.a, made.b)
        yield False
    return after


def _exchange(model: nn.Module, stacks: Mapping[str, StackedAdapters | None]) -> None:
    put(model, stacks)
    current_adapters(model).version += 1


T = TypeVar("T")


@attrs.frozen(kw_only=True, eq=False)
class AdaptersAtRunTime:
    """`changed` gets the bytes of all adapters, on the engine's thread."""

    settings: Settings
    loaded: EvaluatedModel
    group: RankGroup
    names: Names
    side: SideWork
    wake: Callable[[], None]
    changed: Callable[[int], None]

    async def plan(self, name: str, directory: str) -> AdapterPlan:
        """Compute memory from file headers. Raises `ModelUnusable`."""
        found = await self._found(name, directory)
        return await self.side.run(planning(self.loaded.model, self.names, found), self.wake)

    async def load(self, name: str, directory: str) -> AdapterCard:
        """Raises `ModelUnusable` and `OutOfDeviceMemory`."""
        found = await self._found(name, directory)
        digest = await trio.to_thread.run_sync(
            fingerprint_of, found
        )  # A long read, which fills the system's cache of files.
        loaded = self.loaded
        check = partial(require_applied, loaded.model, loaded.card.capabilities, loaded.head)
        try:
            rank, _ = await self.side.run(
                self._noted(adding(loaded.model, self.names, found, check)), self.wake
            )
        except (RuntimeError, MemoryError) as error:
            if lacks_memory(error):
                raise OutOfDeviceMemory(first_line_of(error)) from error
            raise
        return AdapterCard(name=name, directory=str(found.directory), rank=rank, fingerprint=digest)

    async def unload(self, name: str) -> int:
        """Waits until no row has the adapter. Returns the bytes of the others."""
        _, nbytes = await self.side.run(
            self._noted(removing(self.loaded.model, self.names, name)), self.wake
        )
        return nbytes

    async def _found(self, name: str, directory: str) -> FoundAdapter:
        if self.settings.adapter_path is not None:
            raise ModelUnusable(
                "--adapter-path excludes adapters by request", "start the server without it"
            )
        [found] = await trio.to_thread.run_sync(find_adapters, {name: directory}, self.group)
        return found

    def _noted(self, pieces: Pieces[T]) -> Pieces[tuple[T, int]]:
        result = yield from pieces
        self.changed(nbytes := adapter_bytes(self.loaded.model))
        return result, nbytes
