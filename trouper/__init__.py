"""Trouper: an LLM server on MLX and Trio, and the runtime to embed.

async with trio.open_nursery() as nursery:
    runtime = await nursery.start(run_runtime, Settings())
    with await runtime.submit(Generate(request_id="1", prompt=TextPrompt("Once"))) as answer:
        async for delta in answer:
            print(delta.text, end="")
    await runtime.drain(10)
"""

from __future__ import annotations

import trio

from trouper.actors.graph import run_graph
from trouper.actors.runtime import Answer, Runtime
from trouper.protocol.errors import ModelUnusable, Problem, RequestFailed, SettingsInvalid
from trouper.protocol.model import Engine
from trouper.protocol.replies import Delta, Finished
from trouper.protocol.requests import ChatPrompt, Generate, TextPrompt, Timeouts, TokenPrompt
from trouper.protocol.sampling import Sampling
from trouper.protocol.settings import ServerSettings, Settings

__version__ = "0.1.0"
__all__ = [
    "Answer", "ChatPrompt", "Delta", "Finished", "Generate", "ModelUnusable", "Problem", "RequestFailed", "Runtime",
    "Sampling", "ServerSettings", "Settings", "SettingsInvalid", "TextPrompt", "Timeouts", "TokenPrompt", "run_runtime",
]  # fmt: skip


async def run_runtime(
    settings: Settings,
    *,
    engine: Engine | None = None,
    task_status: trio.TaskStatus[Runtime] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Load the model and run the six actors; `nursery.start` returns the `Runtime`. Ends after `Runtime.drain`.

    `engine` None: the real one (MLX). Raises `ModelUnusable`.
    """
    if engine is None:
        from trouper.engine.host import MlxEngine  # Imports MLX, which an embedder with its own engine may not have.

        engine = MlxEngine(settings)
    await run_graph(settings, engine, task_status=task_status)
