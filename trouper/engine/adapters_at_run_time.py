"""Loads and unloads LoRA adapters while rows decode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import attrs
import trio

from trouper.engine.adapter_changes import Names, adding, planning, removing
from trouper.engine.distributed.rank_group import RankGroup
from trouper.engine.loading.adapter_files import FoundAdapter
from trouper.engine.loading.adapter_loading import find_adapters, fingerprint_of, require_applied
from trouper.engine.loading.model_loading import EvaluatedModel
from trouper.engine.lora.lora_layers import adapter_bytes
from trouper.engine.platform.error_text import first_line_of, lacks_memory
from trouper.engine.side_work import Pieces, SideWork
from trouper.protocol.model import AdapterCard, AdapterPlan
from trouper.protocol.problems import ModelUnusable, OutOfDeviceMemory
from trouper.protocol.settings import Settings

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
