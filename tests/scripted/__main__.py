"""`python -m tests.scripted [FLAGS]`: print the URL of a scripted server as one line, and serve
until a signal.

    python -m tests.scripted --family qwen3 --script my_script.py --record requests.jsonl

The server is the real one, over real sockets, with its actors, scheduler, cache and chat template;
the engine's tokens are those of what the script answers. See `tests.scripted.scripts` for what a
script is, `tests.scripted.process` to start one.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import trio

from tests.scripted.engine import ScriptedEngine
from tests.scripted.families import EVERY_FAMILY
from tests.scripted.recording import Recorder
from tests.scripted.scripts import script_of
from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.web.app import create_app
from trouper.web.server import serve_app


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.scripted")
    parser.add_argument("--family", choices=sorted(EVERY_FAMILY), default="qwen3")
    parser.add_argument(
        "--script", default="echo", help="MODULE:FUNCTION, FILE.py[:FUNCTION], FILE.json or echo"
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument(
        "--step-ms", type=float, default=0.0, help="what a step takes; a token is a step"
    )
    parser.add_argument(
        "--prefill-rate", type=float, default=0.0, help="prompt tokens a second; 0: at once"
    )
    parser.add_argument(
        "--follow-grammars",
        action="store_true",
        help="an answer that its grammar refuses becomes one that says so",
    )
    parser.add_argument(
        "--record", type=Path, help="write a JSON line for each HTTP request into this file"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="any setting of the server, as in strict=true",
    )
    return parser.parse_args()


def settings_of(given: argparse.Namespace) -> tuple[Settings, ServerSettings]:
    """What `--set` names goes where there is a field of that name; a text needs no quotes."""
    values: dict[str, Any] = {"no_ssd": True, "port": given.port}
    for pair in given.set:
        name, _, value = pair.partition("=")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    known = {field.name for kind in (Settings, ServerSettings) for field in attrs.fields(kind)}
    if unknown := values.keys() - known:
        raise SystemExit(f"no setting of the server: {', '.join(sorted(unknown))}")
    settings, server = (
        {
            name: value
            for name, value in values.items()
            if name in {field.name for field in attrs.fields(kind)}
        }
        for kind in (Settings, ServerSettings)
    )
    return Settings(**settings), ServerSettings(**server)


async def serve(given: argparse.Namespace, directory: Path) -> None:
    settings, server = settings_of(given)
    recorder = None if given.record is None else Recorder(given.record)
    engine = ScriptedEngine.of(
        script_of(given.script),
        EVERY_FAMILY[given.family],
        directory,
        context_length=given.context,
        step_s=given.step_ms / 1000,
        prefill_rate=given.prefill_rate,
        follows_grammars=given.follow_grammars,
        **({} if recorder is None else {"look": recorder.look}),
    )
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(partial(run_runtime, settings, engine=engine))
        app: Any = create_app(
            runtime, server, nursery, [] if recorder is None else [recorder.observe]
        )
        app = app if recorder is None else recorder.around(app)
        [url] = await nursery.start(partial(serve_app, app, server, shutdown=shutdown))
        print(url, flush=True)  # noqa: T201 - this line is what the program is for
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                break
        await runtime.drain(0)
        shutdown.set()
        nursery.cancel_scope.cancel()


@contextmanager
def place() -> Iterator[Path]:
    """A directory for the tokenizer's files."""
    with TemporaryDirectory(prefix="scripted-") as name:
        yield Path(name)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    with place() as scratch:
        trio.run(serve, arguments(), scratch)
