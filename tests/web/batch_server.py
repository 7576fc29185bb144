"""`python -m tests.web.batch_server DIR`: a server of batches with the fake engine, to be killed. A
prompt that has DEADLY in it kills it.

It prints its URL, and drains when its standard input ends.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import trio

from tests.fakes import FakeEngine, FakeRow
from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.web.server import serve_http

DEADLY = "deadly"
STEP_S = 0.005
STORED_RESPONSES = 100_000
"""More than a campaign makes."""


def kills(rows: Sequence[FakeRow]) -> bool:
    """Like a fault in a kernel: nothing of the process is left to say goodbye."""
    if any(DEADLY.encode() in bytes(token for token in row.prompt if token < 256) for row in rows):
        os.kill(os.getpid(), signal.SIGKILL)
    return False


async def step(_: object) -> None:
    await trio.sleep(STEP_S)


async def serve(directory: Path, rows: int) -> None:
    engine = FakeEngine(before_step=step, dies=kills)
    settings = Settings(no_ssd=True, gather_ms=0)
    server = ServerSettings(
        port=0, batch_dir=directory, batch_rows=rows, stored_responses=STORED_RESPONSES
    )
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(partial(run_runtime, settings, engine=engine))
        [url] = await nursery.start(partial(serve_http, runtime, server, shutdown=shutdown))
        print(url, flush=True)  # noqa: T201
        await trio.to_thread.run_sync(sys.stdin.read)
        await runtime.drain(1)
        shutdown.set()


if __name__ == "__main__":
    trio.run(serve, Path(sys.argv[1]), int(sys.argv[2]))
