"""The command: flags from the settings, logging, signals, and what a person at a terminal sees.

The library does none of these (it neither calls `trio.run` nor touches signals or logging), so that
another program can embed it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import attrs
import click
import trio
from rich.console import Console
from rich.logging import RichHandler

from trouper import ModelUnusable, Runtime, ServerSettings, Settings, SettingsInvalid, run_runtime
from trouper.web.server import serve_http

logger = logging.getLogger("trouper")
USAGE_ERROR = 2
"""Exit code when what was asked for cannot be: a flag, a model, a port. (click's own, too.)"""
DEVICE_STUCK = 70
"""Exit code when the device never finished a step (EX_SOFTWARE): a supervisor should start the process again."""
STUCK_POLL_S = 1.0
LEVELS = ("debug", "info", "warning", "error")


Command = TypeVar("Command", bound=Callable[..., Any])
S = TypeVar("S", bound=attrs.AttrsInstance)


class CannotListenError(Exception):
    """The address is taken, not ours, or not allowed."""


def flags_of(cls: type[attrs.AttrsInstance]) -> Callable[[Command], Command]:
    """A flag, and a variable TROUPER_<NAME>, for each setting: type, default and help are the setting's own."""

    def add(command: Command) -> Command:
        types = get_type_hints(cls)
        for field in reversed(attrs.fields(cls)):
            command = _flag(field, types[field.name])(command)
        return command

    return add


def _flag(field: attrs.Attribute[Any], hint: Any) -> Callable[[Command], Command]:
    kind = next(part for part in (get_args(hint) or (hint,)) if part not in (NoneType, Ellipsis))
    many = get_origin(hint) is tuple
    return click.option(
        "--" + field.name.replace("_", "-"),
        field.name,
        type=click.Path(path_type=Path) if kind is Path else kind,
        is_flag=kind is bool,
        multiple=many,
        default=field.default,
        envvar=f"TROUPER_{field.name.upper()}",
        help=field.metadata["help"],
        show_default=field.default not in (None, False, ()),
        show_envvar=bool(field.metadata.get("secret")),
    )


def settings_from(cls: type[S], given: Mapping[str, Any]) -> S:
    """The settings, of what click collected. Raises `SettingsInvalid`."""
    return cls(**{field.name: given[field.name] for field in attrs.fields(cls)})


@click.group()
@click.version_option(package_name="trouper", message="trouper %(version)s")
def main() -> None:
    """An LLM server of six actors on MLX and Trio. Each flag can also be a variable, as in TROUPER_PORT=8123."""


@main.command()
@flags_of(Settings)
@flags_of(ServerSettings)
@click.option("--log-level", type=click.Choice(LEVELS), default="info", envvar="TROUPER_LOG_LEVEL", show_default=True)
def serve(log_level: str, **given: Any) -> None:
    """Serve a model over HTTP, in OpenAI's dialect."""
    console = Console(stderr=True)
    _configure_logging(log_level, console)
    refused: list[str] = []
    try:
        settings, server_settings = settings_from(Settings, given), settings_from(ServerSettings, given)
        trio.run(run, settings, server_settings, console)
    except* (ModelUnusable, SettingsInvalid, CannotListenError) as group:
        refused = [str(error) for error in _leaves(group)]
    if refused:
        click.secho(f"trouper: {refused[0]}", fg="red", err=True)
        sys.exit(USAGE_ERROR)


def _configure_logging(level: str, console: Console) -> None:
    """Colours for a person, one plain line a record for a file."""
    handler: logging.Handler = logging.StreamHandler()
    layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    if console.is_terminal:
        handler, layout = RichHandler(console=console, show_path=False, rich_tracebacks=True), "%(message)s"
    handler.setFormatter(logging.Formatter(layout))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logger.setLevel(level.upper())


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def run(settings: Settings, server_settings: ServerSettings, console: Console) -> None:
    """Load, serve, and on the first signal drain; returns when everything has ended."""
    _require_address(server_settings.host, server_settings.port)
    leaving, loading = trio.Event(), trio.CancelScope()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as watching:
            watching.start_soon(_watch_signals, signals, leaving, loading)
            async with trio.open_nursery() as nursery:
                with loading, _spinner(settings, console):
                    runtime: Runtime = await nursery.start(run_runtime, settings)
                if not loading.cancelled_caught:
                    watching.start_soon(_watch_device, runtime)
                    await _serve(nursery, runtime, server_settings, leaving)
            watching.cancel_scope.cancel(reason="everything has ended")


async def _watch_signals(signals: AsyncIterator[int], leaving: trio.Event, loading: trio.CancelScope) -> None:
    """While loading there is nobody to drain: loading is cancelled. Later that is a no-op."""
    async for number in signals:
        if leaving.is_set():
            _end_at_once(128 + number)
        logger.info("%s: leaving; once more ends at once", signal.Signals(number).name)
        leaving.set()
        loading.cancel(reason="a signal")


async def _watch_device(runtime: Runtime) -> None:
    """A thread inside the device cannot be cancelled: when it is given up (F18, F27), clients have had their errors,
    so give those a moment to go out, and end the process."""
    while runtime.health().status != "stuck":  # noqa: ASYNC110 - health is looked at; it does not announce itself.
        await trio.sleep(STUCK_POLL_S)
    logger.critical("%s; ending the process", runtime.health().detail)
    await trio.sleep(STUCK_POLL_S)
    _end_at_once(DEVICE_STUCK)


def _end_at_once(code: int) -> NoReturn:
    """Without unwinding: what would have to be waited for is what did not end."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _spinner(settings: Settings, console: Console) -> AbstractContextManager[object]:
    """Not over the hub's own progress bars, and not into a file."""
    local = settings.model is None or Path(settings.model).expanduser().is_dir()
    return console.status("loading the model") if console.is_terminal and local else nullcontext()


async def _serve(nursery: trio.Nursery, runtime: Runtime, settings: ServerSettings, leaving: trio.Event) -> None:
    shutdown = trio.Event()
    try:
        urls: list[str] = await nursery.start(partial(serve_http, runtime, settings, shutdown=shutdown))
    except OSError as error:
        raise _cannot_listen(settings.host, settings.port, error) from error
    _announce(urls[0], runtime, bool(settings.api_key or settings.api_key_file))
    await leaving.wait()
    if not await runtime.drain(settings.drain_timeout_s):
        logger.warning(
            "requests were still running after --drain-timeout-s %g; they were ended", settings.drain_timeout_s
        )
    shutdown.set()


def _announce(url: str, runtime: Runtime, keyed: bool) -> None:
    body = json.dumps({"model": runtime.model.id, "messages": [{"role": "user", "content": "Hello!"}]})
    key = ' -H "Authorization: Bearer $TROUPER_API_KEY"' if keyed else ""
    card = runtime.model
    click.echo(f"{card.id} ({card.architecture}, {card.dtype}, {card.batching}) on {card.device} is ready at {url}/v1")
    click.echo(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'")
    sys.stdout.flush()


def _require_address(host: str, port: int) -> None:
    """Before a model is loaded for minutes. The server's own bind has the last word."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> CannotListenError:
    remedy = "; choose another --port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
    return CannotListenError(f"cannot listen on {host}:{port}: {error.strerror or error}{remedy}")
