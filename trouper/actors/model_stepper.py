"""ModelStepper. Waits on plans; owns the model, the live KV, every lazy array and one OS thread for life."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from trouper.protocol.model import Engine
from trouper.protocol.plans import Plan, Stepped


async def step_model(
    mirrored: trio.MemoryReceiveChannel[Plan],
    results: trio.MemorySendChannel[Stepped],
    engine: Engine,
    crashed: Callable[[Exception], Awaitable[None]] | None = None,
) -> None:
    """Answer every plan until they end. What the engine raises is this actor's crash; a restart begins with no rows.
    `crashed` hears of it before anybody sees that the results have ended."""
    with mirrored, results:
        try:
            await engine.step(mirrored, results)
        except Exception as error:
            if crashed is not None:
                await crashed(error)
            raise
