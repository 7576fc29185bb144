"""The ModelStepper actor. Waits on plans; owns the model, the live KV, every lazy array and one OS
thread for life."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from trouper.protocol.model import Engine
from trouper.protocol.plan_channel import PlanReceiver
from trouper.protocol.plans import Stepped


async def step_model(
    plans: PlanReceiver,
    results: trio.MemorySendChannel[Stepped],
    engine: Engine,
    crashed: Callable[[Exception], Awaitable[None]] | None = None,
) -> None:
    """Answer every plan until the channel ends. An exception of the engine is a crash of this
    actor; a restart begins with no rows. `crashed` is awaited before `results` ends."""
    with plans, results:
        try:
            await engine.step(plans, results)
        except Exception as error:
            if crashed is not None:
                await crashed(error)
            raise
