"""ModelStepper. Waits on plans; owns the model, the live KV, every lazy array and one OS thread for life."""

from __future__ import annotations

import trio

from trouper.protocol.model import Engine
from trouper.protocol.plans import Plan, Stepped


async def step_model(
    mirrored: trio.MemoryReceiveChannel[Plan],
    results: trio.MemorySendChannel[Stepped],
    engine: Engine,
) -> None:
    """Answer every plan until they end. What the engine raises is this actor's crash; a restart begins with no rows."""
    with mirrored, results:
        await engine.step(mirrored, results)
