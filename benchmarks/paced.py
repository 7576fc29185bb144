"""A server whose engine computes nothing but takes its time, with rows that always decode: what is
left is the server itself.

For `just bench-page --cpu`, in a process of its own: `python -m benchmarks.paced ROWS`. It says its
address, and goes on until killed.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import count

import trio

from tests.actors.bench import generate
from tests.fakes import FakeEngine
from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.web.server import serve_http

STEP_S = 0.09
"""As SmolLM2-135M at 8 rows on a small CPU."""
TOKENS = 150


async def step(_: object) -> None:
    await trio.sleep(STEP_S)


async def ask(runtime: Runtime, row: int) -> None:
    for number in count():
        request = generate(
            f"row{row}-{number}", tokens=20 + row, max_tokens=TOKENS, ignore_eos=True
        )
        with await runtime.submit(request) as answer:
            async for _ in answer:
                pass


async def main(rows: int) -> None:
    async with trio.open_nursery() as nursery:
        engine = FakeEngine(before_step=step)
        runtime = await nursery.start(partial(run_runtime, Settings(no_ssd=True), engine=engine))
        serve = partial(serve_http, runtime, ServerSettings(port=0), shutdown=trio.Event())
        [url] = await nursery.start(serve)
        for row in range(rows):
            nursery.start_soon(ask, runtime, row)
        print(url, flush=True)


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]))
