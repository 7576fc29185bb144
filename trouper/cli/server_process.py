from __future__ import annotations

import gc
import json
import logging
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from typing import Any

import attrs
import click
import trio
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from trouper import ModelManager, ServerSettings, Settings, run_models
from trouper.actors.ranks.leader import Leader
from trouper.cli import BEGAN
from trouper.cli.address import cannot_listen, require_address
from trouper.cli.exits import DEVICE_STUCK, end_at_once, forget, insists, leaving_signals
from trouper.cli.rank_process import end_with_group
from trouper.cli.terminal_text import line_shown
from trouper.protocol.loading import Loading, LoadWatch
from trouper.protocol.logs import FIELDS
from trouper.protocol.model import ModelCard
from trouper.protocol.model_options import ModelOptions
from trouper.protocol.record import Reason, RequestRecord
from trouper.run import mlx_engine
from trouper.web.keys.key_file import require_keys
from trouper.web.observability.exchange import ExchangeObserver
from trouper.web.server import serve_http
from trouper.web.serving.tool_support import notice

WIDE = 100  # Columns from which on the speed is shown
FIXED_WIDTH = len("- " + " ━━━━━━━━━━" + " 100.0/999.9 GB")  # Columns beside the description
SPEED = len(" 100.0 MB/s")


@contextmanager
def shown(console: Console) -> Iterator[LoadWatch]:
    """Show a bar for each stage, or a line of the log where there is no terminal. Before the first,
    the model hub has bars."""
    progress = Progress(
        *_columns(console.width), console=console, transient=True, disable=not console.is_terminal
    )
    tasks: dict[str, TaskID] = {}
    over = False

    def watch(loading: Loading) -> None:
        if over:
            return
        progress.start()
        if loading.stage not in tasks:
            if progress.disable:
                logger.info("%s: %s", _short(loading.model), loading.stage)
            tasks[loading.stage] = progress.add_task(
                f"{_short(loading.model)}: {loading.stage}",
                total=loading.total_bytes,
                unit=loading.unit,
            )
        progress.update(tasks[loading.stage], completed=loading.done_bytes)

    try:
        yield watch
    finally:
        over = True
        progress.stop()


def _short(model: str) -> str:
    return PurePath(model).name or model


def _columns(width: int) -> Iterator[ProgressColumn]:
    room = width - FIXED_WIDTH - (SPEED if width >= WIDE else 0)
    cut = Column(max_width=max(room, 1), no_wrap=True, overflow="ellipsis")
    yield SpinnerColumn()
    yield TextColumn("{task.description}", markup=False, table_column=cut)
    yield BarColumn(None)
    yield Done(table_column=Column(no_wrap=True))
    if width >= WIDE:
        yield Speed(table_column=Column(no_wrap=True))


class Done(DownloadColumn):
    def render(self, task: Task) -> Text:
        if task.fields.get("unit") != "steps":
            return super().render(task)
        return Text(f"{task.completed:.0f}/{task.total:.0f}", style="progress.download")


class Speed(TransferSpeedColumn):
    def render(self, task: Task) -> Text:
        return Text("") if task.fields.get("unit") == "steps" else super().render(task)


logger = logging.getLogger("trouper")
STUCK_POLL_S = 1.0
LOADING_ENDS_S = 2.0  # A thread that reads weights cannot be interrupted, and loses nothing.
ENDS_S = 15.0  # After a drain; a thread may wait for a file system for ever.

# Threads with such names may run to the end.
UNCONCERNED = ("MainThread", "Trio thread ", "idle engine thread", "trouper log", "launcher")


async def run(
    settings: Sequence[Settings],
    server_settings: ServerSettings,
    console: Console,
    exchange_observers: Sequence[ExchangeObserver] = (),
    *,
    ranks: Leader | None = None,
    options: Mapping[str, ModelOptions] | None = None,
) -> None:
    """Load, serve, and drain on the first signal. `exchange_observers`: as for `serve_http`;
    `options`: as for `run_models`. Raises `CannotListenError` and `SettingsInvalid` before a model
    is loaded."""
    require_address(server_settings.host, server_settings.port)
    await require_keys(server_settings)
    leaving, loading, over, drained = trio.Event(), trio.CancelScope(), trio.Event(), trio.Event()
    last = LastRequests(server_settings.drain_timeout_s)
    with trio.open_signal_receiver(*leaving_signals()) as signals:
        async with trio.open_nursery() as watching:
            watching.start_soon(_watch_signals, signals, leaving, loading)
            watching.start_soon(_watch_end, leaving, drained, last)
            if ranks is None:
                watching.start_soon(_watch_loading, leaving, over)
            else:
                watching.start_soon(end_with_group, ranks)
            async with trio.open_nursery() as nursery:
                with loading, shown(console) as watch:
                    mlx_engine()  # Takes a second: an address that is taken is told before.
                    imported = time.perf_counter()
                    start = partial(
                        run_models,
                        settings,
                        server_settings,
                        options=options,
                        watch=watch,
                        ranks=ranks,
                    )
                    models: ModelManager = await nursery.start(start)
                over.set()
                _freeze_heap()
                if not loading.cancelled_caught:
                    watching.start_soon(_watch_device, models)
                    await _serve(
                        nursery,
                        models,
                        server_settings,
                        leaving=leaving,
                        drained=drained,
                        last=last,
                        exchange_observers=exchange_observers,
                        imports_s=imported - BEGAN,
                    )
            watching.cancel_scope.cancel(reason="everything has ended")
    last.tell()


@attrs.define(eq=False)
class LastRequests:
    """Counts the requests that end during a drain, for the last line of the log."""

    drain_timeout_s: float
    began_at: float | None = None
    """trio.current_time() of the drain."""
    ended: Counter[Reason] = attrs.field(factory=Counter)

    def note(self, record: RequestRecord) -> None:
        if self.began_at is not None:
            self.ended[record.reason] += 1

    def tell(self) -> None:
        if self.began_at is None:  # The process ends before it served.
            return
        fields = {
            "event": "left",
            "seconds": trio.current_time() - self.began_at,
            "finished": self.ended["stop"] + self.ended["length"],
            "cut_off": self.ended["error"],
            "drain_timeout_s": self.drain_timeout_s,
            "exit_code": 0,
        }
        logger.log(
            logging.WARNING if self.ended["error"] else logging.INFO,
            "left after %(seconds).1f s; requests finished: %(finished)d, cut off: %(cut_off)d "
            "(--drain-timeout-s %(drain_timeout_s)g); exit code %(exit_code)d",
            fields,
            extra={FIELDS: fields},
        )


def _freeze_heap() -> None:
    # A full collection of the libraries' objects stops every stream for several steps.
    gc.collect()
    gc.freeze()
    # Requests that end well leave no cycles of ours, and others are looked for once they may hold
    # much (`current_request.Heap`). At Python's 700, the objects of all requests in progress were
    # looked at again and again: a sixth of the event loop's time in a burst.
    gc.set_threshold(100_000)


async def _watch_signals(
    signals: AsyncIterator[int], leaving: trio.Event, loading: trio.CancelScope
) -> None:
    """The first signal drains, or cancels loading, the second ends the process."""
    async for number in signals:
        once_more = insists(number)
        if leaving.is_set():
            if once_more:
                end_at_once(128 + number)
            continue
        logger.info("%s: leaving; once more ends at once", signal.Signals(number).name)
        leaving.set()
        loading.cancel(reason="a signal")


async def _watch_loading(leaving: trio.Event, over: trio.Event) -> None:
    await leaving.wait()
    with trio.move_on_after(LOADING_ENDS_S):
        await over.wait()
        return
    end_at_once(0)


async def _watch_end(leaving: trio.Event, drained: trio.Event, last: LastRequests) -> None:
    await leaving.wait()
    with trio.move_on_after(last.drain_timeout_s + ENDS_S):
        await drained.wait()
        await trio.sleep(ENDS_S)
    names = sorted(
        thread.name for thread in threading.enumerate() if not thread.name.startswith(UNCONCERNED)
    )
    logger.error(
        "the drain has not ended this process, so it ends now; threads that still run: %s",
        ", ".join(names),
    )
    last.tell()
    end_at_once(0)


async def _watch_device(models: ModelManager) -> None:
    """End the process when a device is given up (F18, F27): its threads cannot be cancelled."""
    # Health is looked at; it does not announce itself.
    while (detail := _stuck(models)) is None:  # noqa: ASYNC110
        await trio.sleep(STUCK_POLL_S)
    logger.critical("%s; ending the process", detail)
    await trio.sleep(STUCK_POLL_S)
    end_at_once(DEVICE_STUCK)


def _stuck(models: ModelManager) -> str | None:
    healths = [entry.runtime.health() for entry in models.entries() if entry.runtime is not None]
    return next((health.detail for health in healths if health.status == "stuck"), None)


async def _serve(
    nursery: trio.Nursery,
    models: ModelManager,
    settings: ServerSettings,
    *,
    leaving: trio.Event,
    drained: trio.Event,
    last: LastRequests,
    exchange_observers: Sequence[ExchangeObserver],
    imports_s: float,
) -> None:
    shutdown = trio.Event()
    try:
        urls: list[str] = await nursery.start(
            partial(
                serve_http,
                models,
                settings,
                shutdown=shutdown,
                observers=[last.note],
                exchange_observers=exchange_observers,
            )
        )
    except OSError as error:
        raise cannot_listen(settings.host, settings.port, error) from error
    announce(urls[0], models, bool(settings.api_key or settings.api_key_file))
    logger.info("ready after %.1f s, imports %.1f s", time.perf_counter() - BEGAN, imports_s)
    await leaving.wait()
    last.began_at = trio.current_time()
    await models.drain(settings.drain_timeout_s)
    drained.set()
    shutdown.set()


KEY_VARIABLE = "TROUPER_API_KEY"


def announce(url: str, models: ModelManager, keyed: bool) -> None:
    """Print the address and examples. Without a reader the server goes on."""
    try:
        for line in lines_of(url, models, keyed):
            click.echo(line_shown(line))
    except OSError:
        forget(sys.stdout)


def lines_of(url: str, models: ModelManager, keyed: bool) -> Iterator[str]:
    first, *others = models.entries()
    assert first.runtime is not None, "the first model is loaded before the server starts"
    card = first.runtime.model
    yield first_line(url, first.names[0], card)
    for other in others:
        yield f"{other.names[0]} is loaded now, if it fits, or when it is first asked for"
    yield f"live: {url}/   chat: trouper chat --url {shlex.quote(url)}   the API: {url}/docs"
    if card.no_generation:
        yield curl(url, first.names[0], keyed, *EXAMPLES["reranker" if card.scores else "embedder"])
        return
    yield from snippets(url, first.names[0], keyed)
    if lacking := notice(first.names[0], first.runtime):
        yield lacking


def first_line(url: str, name: str, card: ModelCard) -> str:
    """For programs, too: ends in `is ready at URL/v1`."""
    split = f", a pipeline of {card.ranks} ranks" if card.pipeline else ""
    return (
        f"{name} ({card.architecture}, {card.dtype}, {card.batching}{split}) on {card.device} "
        f"is ready at {url}/v1"
    )


EXAMPLES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "embedder": ("embeddings", {"input": ["a cat", "a dog"]}),
    "reranker": ("rerank", {"query": "What barks?", "documents": ["A dog.", "A spoon."]}),
}
"""Endpoint and body of an example, for models that generate nothing."""
EXAMPLE_TOKENS = 512


def curl(url: str, model: str, keyed: bool, endpoint: str, fields: Mapping[str, Any]) -> str:
    header = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if keyed else ""
    return (
        f"curl {shlex.quote(f'{url}/v1/{endpoint}')} -H 'Content-Type: application/json'{header} "
        f"-d {shlex.quote(json.dumps({'model': model, **fields}))}"
    )


def snippets(url: str, model: str, keyed: bool) -> Iterator[str]:
    messages = [{"role": "user", "content": "Hello!"}]
    # Small models may not stop by themselves.
    fields = {"messages": messages, "max_tokens": EXAMPLE_TOKENS}
    yield curl(url, model, keyed, "chat/completions", fields)
    key = f'os.environ["{KEY_VARIABLE}"]' if keyed else '"none"'
    yield f"{'import os, openai' if keyed else 'import openai'}"
    yield f'client = openai.OpenAI(base_url="{url}/v1", api_key={key})'
    yield (
        f"answer = client.chat.completions.create(model={json.dumps(model)}, "
        f"messages={json.dumps(messages)}, max_tokens={EXAMPLE_TOKENS})"
    )
    yield "print(answer.choices[0].message.content)"
