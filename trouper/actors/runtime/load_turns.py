"""Turns of loading: models are loaded one after another, but not behind one whose files do not
answer.

A dead network mount, or a FIFO in the place of a file, hangs in the middle of a load, and nothing
can interrupt the thread. So a load that says nothing for SILENT_S gives its turn to the others; its
weights count as loaded, since it may yet go on. After STALLED_S requests for it are refused by
name, until it says something again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from trouper.actors.runtime.load_progress import LoadProgress
from trouper.actors.runtime.model_unloading import ManagedModel
from trouper.protocol.problems import Problem

log = logging.getLogger("trouper.models")
LOOK_S = 1.0
SILENT_S = 15.0
"""Time without progress after which others load beside this model. Most files take less than a
second to be opened and read."""
STALLED_S = 120.0
"""Time without progress after which requests for the model are refused. Kernels of a large model
take up to a minute to compile."""


class LoadTurns:
    """Whose turn it is. `changed` is called when a model has stalled, or goes on."""

    def __init__(self, progress: LoadProgress, changed: Callable[[], None]) -> None:
        self._progress, self._changed = progress, changed
        self._turn = trio.CapacityLimiter(1)
        self._holder: object = None

    async def take(self, holder: object) -> None:
        """Wait for the turn, in the order of asking."""
        await self._turn.acquire_on_behalf_of(holder)
        self._holder = holder

    def give(self, holder: object) -> None:
        """Give the turn to the next, unless that was done before."""
        if self._holder is holder:
            self._holder = None
            self._turn.release_on_behalf_of(holder)

    async def watched(self, model: ManagedModel, load: Callable[[], Awaitable[None]]) -> None:
        """Load a model in its turn, which ends early if nothing is heard of it. Raises what `load`
        raises."""
        failed: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, model)
            try:
                await load()
            except Exception as error:  # noqa: BLE001 - raised again below, outside of the nursery, which would wrap it.
                failed = error
            nursery.cancel_scope.cancel()
        model.is_silent, model.problem = False, model.problem if failed else None
        if failed is not None:
            raise failed

    async def _watch(self, model: ManagedModel) -> None:
        latest, since = self._progress.of(model.settings.model), trio.current_time()
        while True:
            await trio.sleep(LOOK_S)
            found, silent_s = self._progress.of(model.settings.model), trio.current_time() - since
            if found is not latest:
                latest, since = found, trio.current_time()
                self._note(model, None)
            elif silent_s >= STALLED_S:
                self._note(model, _stalled(model))
            elif silent_s >= SILENT_S and not model.is_silent:
                model.is_silent = True
                self.give(model)
                self._changed()

    def _note(self, model: ManagedModel, problem: Problem | None) -> None:
        if (problem is None) != (model.problem is None):
            model.problem = problem
            log.warning(
                "%s", f"{model.names[0]} goes on loading" if problem is None else problem.message
            )
            self._changed()


def _stalled(model: ManagedModel) -> Problem:
    message = (
        f"{model.names[0]} is being loaded and has made no progress for {STALLED_S:g} s: its files "
        f"({model.settings.model}) may be on a file system that does not answer"
    )
    return Problem(
        503, message, "server_error", "model", code="model_load_stalled", retry_after_s=30
    )
