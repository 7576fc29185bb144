"""Room for a model that is to be loaded: waiting for it, and unloading idle models for it. A model
that waits does not keep others from being loaded, and nothing is unloaded unless all idle models
together make enough room."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import TYPE_CHECKING

import trio

from trouper.actors.runtime.adapter_room import insufficient
from trouper.actors.runtime.model_unloading import (
    ManagedModel,
    has_room,
    lacking_after_pinned,
    lacking_room,
    loaded,
    next_to_unload,
)
from trouper.protocol.problems import Problem, RequestFailed

if TYPE_CHECKING:
    from trouper.actors.runtime.model_manager import ModelManager


def has_room_now(manager: ModelManager, model: ManagedModel) -> bool:
    """Whether a model fits beside those that are loaded."""
    return has_room(
        [other for other in loaded(manager.models) if other is not model], model, manager.limits
    )


async def until_room(manager: ModelManager, model: ManagedModel) -> bool:
    """Wait until a model would fit if all idle ones were unloaded. False: nobody waits for it any
    more. Raises `RequestFailed` (503): at once if it does not fit beside the pinned models, else
    when the others were in use for --queue-timeout-s."""
    limit_s = model.settings.queue_timeout_s or inf
    with trio.move_on_after(limit_s):
        while lacking_room(manager.models, model, manager.limits):
            if reason := lacking_after_pinned(manager.models, model, manager.limits):
                raise _refused(reason)
            if not model.waiting:
                return False
            await manager.changed.wait()
        return True
    raise _refused(
        f"{model.names[0]} is not loaded, and the other models were in use for {limit_s:g} s "
        "(--model-memory)"
    )


async def make_room(manager: ModelManager, model: ManagedModel) -> bool:
    """Unload idle models, those that were not used for longest first, until a model fits. False:
    too many are in use again."""
    while not has_room_now(manager, model):
        idle = next_to_unload(manager.models)
        if idle is None or lacking_room(manager.models, model, manager.limits):
            return False
        await manager.unload(idle)
    return True


async def load_in_turn(
    manager: ModelManager, model: ManagedModel, load: Callable[[], Awaitable[None]]
) -> None:
    """Load a model when it is its turn and there is room for it, unless nobody waits for it any
    more. Raises `RequestFailed` (503), and what `load` raises."""
    while await until_room(manager, model):
        await manager.turns.take(model)
        try:
            if await make_room(manager, model):
                await (manager.turns.watched(model, load) if len(manager.models) > 1 else load())
                return
        finally:
            manager.turns.give(model)


async def room_for_adapter(
    manager: ModelManager, model: ManagedModel, adapter: str, nbytes: int
) -> None:
    """Make room for a LoRA adapter of a loaded model among the weights of all models
    (--model-memory): its bytes count as the model's from then on, until the caller says what the
    model has. Raises `RequestFailed` (507)."""
    model.weights_bytes += nbytes
    await manager.turns.take(turn := object())
    try:
        reason = lacking_room(manager.models, model, manager.limits)
        if not reason and not await make_room(manager, model):
            reason = (
                lacking_room(manager.models, model, manager.limits)
                or "idle models are in use again: try again"
            )
    finally:
        manager.turns.give(turn)
    if reason:
        raise insufficient(f"with the adapter {adapter!r} {reason}")


def _refused(message: str) -> RequestFailed:
    return RequestFailed(
        Problem(503, message, "server_error", "model", code="no_memory_for_model", retry_after_s=5)
    )
