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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import attrs
import click
import trio
from rich.console import Console
from rich.filesize import decimal
from rich.logging import RichHandler
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from trouper import Fleet, ModelUnusable, ServerSettings, Settings, SettingsInvalid, run_fleet
from trouper.storage import inspect
from trouper.web.server import serve_http

logger = logging.getLogger("trouper")
USAGE_ERROR = 2
"""Exit code when what was asked for cannot be: a flag, a model, a port. (click's own, too.)"""
DEVICE_STUCK = 70
"""Exit code when the device never finished a step (EX_SOFTWARE): a supervisor should start the process again."""
STUCK_POLL_S = 1.0
DAMAGE_FOUND = 1
"""Exit code of `trouper cache verify` when a file is not sound."""
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
    each = bool(field.metadata.get("each"))
    return click.option(
        "--" + field.name.replace("_", "-"),
        field.name,
        type=click.Path(path_type=Path) if kind is Path else OneOfSeveral() if each else kind,
        is_flag=kind is bool,
        multiple=each or get_origin(hint) is tuple,
        default=() if each else field.default,
        envvar=f"TROUPER_{field.name.upper()}",
        help=field.metadata["help"],
        show_default=field.default not in (None, False, ()),
        show_envvar=bool(field.metadata.get("secret")),
    )


class OneOfSeveral(click.types.StringParamType):
    """Text. In a variable, several are parted as paths are: a model may be a directory with blanks in its name."""

    envvar_list_splitter = os.pathsep


def settings_from(cls: type[S], given: Mapping[str, Any], **one: Any) -> S:
    """The settings, of what click collected and of `one`, which has the flags that are for each of several. Raises
    `SettingsInvalid`."""
    return cls(**{field.name: one.get(field.name, given[field.name]) for field in attrs.fields(cls)})


def models_from(given: Mapping[str, Any]) -> list[Settings]:
    """One for each --model. Raises `SettingsInvalid`."""
    models = tuple(dict.fromkeys(given["model"]))
    if len(models) > 1 and given["adapter_path"] is not None:
        raise SettingsInvalid("--adapter-path is for one model: give one --model with it")
    return [settings_from(Settings, given, model=model) for model in models or (None,)]


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
        settings, server_settings = models_from(given), settings_from(ServerSettings, given)
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


async def run(settings: Sequence[Settings], server_settings: ServerSettings, console: Console) -> None:
    """Load, serve, and on the first signal drain; returns when everything has ended."""
    _require_address(server_settings.host, server_settings.port)
    leaving, loading = trio.Event(), trio.CancelScope()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as watching:
            watching.start_soon(_watch_signals, signals, leaving, loading)
            async with trio.open_nursery() as nursery:
                with loading, _spinner(settings, console):
                    fleet: Fleet = await nursery.start(run_fleet, settings, server_settings)
                if not loading.cancelled_caught:
                    watching.start_soon(_watch_device, fleet)
                    await _serve(nursery, fleet, server_settings, leaving)
            watching.cancel_scope.cancel(reason="everything has ended")


async def _watch_signals(signals: AsyncIterator[int], leaving: trio.Event, loading: trio.CancelScope) -> None:
    """While loading there is nobody to drain: loading is cancelled. Later that is a no-op."""
    async for number in signals:
        if leaving.is_set():
            _end_at_once(128 + number)
        logger.info("%s: leaving; once more ends at once", signal.Signals(number).name)
        leaving.set()
        loading.cancel(reason="a signal")


async def _watch_device(fleet: Fleet) -> None:
    """A thread inside the device cannot be cancelled: when it is given up (F18, F27), clients have had their errors,
    so give those a moment to go out, and end the process."""
    while (detail := _stuck(fleet)) is None:  # noqa: ASYNC110 - health is looked at; it does not announce itself.
        await trio.sleep(STUCK_POLL_S)
    logger.critical("%s; ending the process", detail)
    await trio.sleep(STUCK_POLL_S)
    _end_at_once(DEVICE_STUCK)


def _stuck(fleet: Fleet) -> str | None:
    """What a model's health says if its device is given up."""
    healths = [one.runtime.health() for one in fleet.listed() if one.runtime is not None]
    return next((health.detail for health in healths if health.status == "stuck"), None)


def _end_at_once(code: int) -> NoReturn:
    """Without unwinding: what would have to be waited for is what did not end."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _spinner(settings: Sequence[Settings], console: Console) -> AbstractContextManager[object]:
    """Not over the hub's own progress bars, and not into a file."""
    model = settings[0].model
    local = model is None or Path(model).expanduser().is_dir()
    return console.status("loading the model") if console.is_terminal and local else nullcontext()


async def _serve(nursery: trio.Nursery, fleet: Fleet, settings: ServerSettings, leaving: trio.Event) -> None:
    shutdown = trio.Event()
    try:
        urls: list[str] = await nursery.start(partial(serve_http, fleet, settings, shutdown=shutdown))
    except OSError as error:
        raise _cannot_listen(settings.host, settings.port, error) from error
    _announce(urls[0], fleet, bool(settings.api_key or settings.api_key_file))
    await leaving.wait()
    if not await fleet.drain(settings.drain_timeout_s):
        logger.warning(
            "requests were still running after --drain-timeout-s %g; they were ended", settings.drain_timeout_s
        )
    shutdown.set()


def _announce(url: str, fleet: Fleet, keyed: bool) -> None:
    first, *others = fleet.listed()
    assert first.runtime is not None, "the first model is loaded before the server starts"
    body = json.dumps({"model": first.names[0], "messages": [{"role": "user", "content": "Hello!"}]})
    key = ' -H "Authorization: Bearer $TROUPER_API_KEY"' if keyed else ""
    card = first.runtime.model
    click.echo(
        f"{first.names[0]} ({card.architecture}, {card.dtype}, {card.batching}) on {card.device} is ready at {url}/v1"
    )
    for other in others:
        click.echo(f"{other.names[0]} is loaded now, if it fits, or when it is first asked for")
    click.echo(f"the API: {url}/docs")
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


@main.group()
def cache() -> None:
    """What servers keep on disk: look at it, check it, remove it. A server may use it meanwhile."""


def _of_directory(command: Callable[..., None]) -> Callable[..., None]:
    """The flag that `serve` has, and one line for what is wrong with it."""
    field = attrs.fields(Settings).ssd_cache_dir

    @wraps(command)
    def run_on(ssd_cache_dir: Path | None, **given: Any) -> None:
        directory = Settings(ssd_cache_dir=ssd_cache_dir).blocks_dir
        assert directory is not None, "--no-ssd is not a flag of these"
        try:
            command(directory, **given)
        except OSError as error:
            click.secho(f"trouper: {error.filename or directory}: {error.strerror or error}", fg="red", err=True)
            sys.exit(USAGE_ERROR)

    return _flag(field, get_type_hints(Settings)[field.name])(run_on)


@cache.command("ls")
@_of_directory
def list_cache(directory: Path) -> None:
    """One line for each model (and way to keep its KV), the last used one first."""
    facts = inspect.namespaces(directory)
    if not facts:
        click.echo(f"nothing is cached in {directory}")
        return
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("namespace", no_wrap=True)
    for name in ("files", "size", "blocks", "tokens", "used"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in facts:
        counts = (str(one.files), decimal(one.bytes), str(one.blocks), str(one.tokens))
        table.add_row(one.name, *counts, _age(one.newest_s))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@cache.command("stats")
@_of_directory
def cache_stats(directory: Path) -> None:
    """What all of it comes to."""
    facts = inspect.total(inspect.namespaces(directory))
    click.echo(f"directory   {directory}")
    click.echo(f"size        {decimal(facts.bytes)} in {facts.files} files")
    click.echo(f"blocks      {facts.blocks} ({facts.tokens} tokens)")
    click.echo(f"snapshots   {facts.snapshots}")
    click.echo(f"unreadable  {facts.unreadable} files")
    if facts.files:
        click.echo(f"used        {_age(facts.newest_s)} ago to {_age(facts.oldest_s)} ago")
        click.echo(f"free disk   {decimal(inspect.DISK.free_bytes(directory))}")


@cache.command("verify")
@click.option("--remove", is_flag=True, help="Remove what is damaged. A server does so when it comes across it.")
@_of_directory
def verify_cache(directory: Path, remove: bool) -> None:
    """Read every file and compare it with its checksums. Exit code 1 if one is damaged."""
    files = inspect.runs(directory)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    damaged = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verifying", total=sum(size for _, size in files))
        for checked in inspect.verify(files, remove=remove):
            progress.advance(task, checked.bytes)
            if checked.problem is not None:
                damaged += 1
                click.echo(f"{checked.path}: {checked.problem}")
    click.echo(f"{len(files)} files, {decimal(sum(size for _, size in files))}: {damaged or 'none'} damaged")
    if damaged:
        sys.exit(DAMAGE_FOUND)


@cache.command("clear")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_of_directory
def clear_cache(directory: Path, yes: bool) -> None:
    """Remove all that is cached, of every model."""
    facts = inspect.total(inspect.namespaces(directory))
    if not yes:
        click.confirm(f"Remove {facts.files} files ({decimal(facts.bytes)}) from {directory}?", abort=True)
    removed = inspect.clear(directory)
    click.echo(f"removed {removed.files} files ({decimal(removed.bytes)})")


def _age(seconds: float) -> str:
    for unit, length_s in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
