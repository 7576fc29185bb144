"""The API mounted in a Quart app of your own: your pages at /, Trouper's under /llm.

python examples/mounted.py --model DIR --port 8000
curl http://127.0.0.1:8000/poem/rain
curl http://127.0.0.1:8000/llm/v1/models
"""

from __future__ import annotations

import argparse
import signal
from functools import partial
from uuid import uuid4

import trio
from hypercorn.middleware.dispatcher import TrioDispatcherMiddleware
from hypercorn.typing import ASGIFramework
from quart_trio import QuartTrio

from trouper import (
    ChatPrompt,
    Engine,
    Generate,
    RequestFailed,
    Runtime,
    ServerSettings,
    Settings,
    run_runtime,
)
from trouper.web import create_app, serve_app


def own_app(runtime: Runtime) -> QuartTrio:
    """Yours: it shares the batch and the cache with whoever uses the API."""
    app = QuartTrio(__name__)

    @app.get("/poem/<subject>")
    async def poem(subject: str) -> tuple[str, int]:
        message = {"role": "user", "content": f"Write a short poem about {subject}."}
        request = Generate(request_id=uuid4().hex, prompt=ChatPrompt((message,)), max_tokens=64)
        try:
            # Left early, as when the client goes away, it is withdrawn.
            with await runtime.submit(request) as answer:
                return "".join([delta.text async for delta in answer]), 200
        except RequestFailed as failed:
            return failed.problem.message, failed.problem.status

    return app


async def main(
    settings: Settings,
    server: ServerSettings,
    *,
    engine: Engine | None = None,
    leaving: trio.Event,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `leaving`. `engine` None: the real one. Tests bring their own."""
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(partial(run_runtime, settings, engine=engine))
        mounts: dict[str, ASGIFramework] = {
            "/llm": create_app(runtime, server, nursery),
            "": own_app(runtime),
        }
        shutdown = trio.Event()
        serve = partial(serve_app, TrioDispatcherMiddleware(mounts), server, shutdown=shutdown)
        [url] = await nursery.start(serve)
        print(f"{url}/poem/rain and {url}/llm/v1/models", flush=True)
        task_status.started(url)
        await leaving.wait()
        # Running requests finish, new ones get 503; then the server may end.
        await runtime.drain(timeout_s=10)
        shutdown.set()


async def until_a_signal(settings: Settings, server: ServerSettings) -> None:
    """Signals are the program's business, never the library's."""
    leaving = trio.Event()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(main, settings, server, leaving=leaving))
            async for _ in signals:
                leaving.set()
                break


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Serve poems, and an API beside them.")
    arguments.add_argument("--model", help="local directory or hub id; nothing: the embedded model")
    arguments.add_argument("--port", type=int, default=8000)
    options = arguments.parse_args()
    trio.run(until_a_signal, Settings(model=options.model), ServerSettings(port=options.port))
