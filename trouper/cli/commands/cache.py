"""`trouper cache`: what servers keep on disk."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, get_type_hints

import attrs
import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from trouper.cli.exits import DAMAGE_FOUND, refuse
from trouper.cli.flags import flag
from trouper.cli.settings_file import configured
from trouper.cli.terminal_text import print_listing
from trouper.protocol.paths import exists
from trouper.protocol.settings import Settings
from trouper.storage import cache_inspection


@click.group()
def cache() -> None:
    """List, check and remove cached prompts on disk. A server may run
    meanwhile."""


def _of_directory(command: Callable[..., None], *, must_exist: bool = False) -> Callable[..., None]:
    """Add the flag of `serve`. `must_exist`: a named directory must be there."""
    field = attrs.fields(Settings).ssd_cache_dir

    @wraps(command)
    def run_on(ssd_cache_dir: Path | None, **given: Any) -> None:
        directory = Settings(ssd_cache_dir=ssd_cache_dir).blocks_dir
        assert directory is not None, "--no-ssd is not a flag of these"
        if must_exist and ssd_cache_dir is not None and not exists(directory):
            refuse(
                f"there is no directory {directory}; --ssd-cache-dir names one that a server has "
                "used"
            )
        try:
            command(directory, **given)
        except OSError as error:
            if error.filename is None and error.errno in (errno.ENOSPC, errno.EPIPE):
                raise  # That of the output, since only `clear` changes the directory.
            refuse(f"{error.filename or directory}: {error.strerror or error}")

    return configured(flag(field, get_type_hints(Settings)[field.name])(run_on))


@cache.command("ls")
@_of_directory
def list_cache(directory: Path) -> None:
    """List cached prompts: a line for each model and number of KV bits, the last used one first."""
    namespaces = cache_inspection.namespaces(directory)
    if not namespaces:
        click.echo(f"nothing is cached in {directory}")
        return
    rows = [
        (
            entry.name,
            str(entry.files),
            decimal(entry.bytes),
            str(entry.blocks),
            str(entry.tokens),
            _age(entry.newest_s),
        )
        for entry in namespaces
    ]
    print_listing(("namespace", "files", "size", "blocks", "tokens", "used"), rows)


@cache.command("stats")
@_of_directory
def cache_stats(directory: Path) -> None:
    """Print totals: bytes, files, blocks and snapshots."""
    usage = cache_inspection.total(cache_inspection.namespaces(directory))
    click.echo(f"directory   {directory}")
    click.echo(f"size        {decimal(usage.bytes)} in {usage.files} files")
    click.echo(f"blocks      {usage.blocks} ({usage.tokens} tokens)")
    click.echo(f"snapshots   {usage.snapshots}")
    click.echo(f"unreadable  {usage.unreadable} files")
    if usage.files:
        click.echo(f"used        {_age(usage.newest_s)} ago to {_age(usage.oldest_s)} ago")
        click.echo(f"free disk   {decimal(cache_inspection.DISK.free_bytes(directory))}")


@cache.command("verify")
@click.option(
    "--remove",
    is_flag=True,
    help="Remove what is damaged. A server does so when it comes across it.",
)
@partial(_of_directory, must_exist=True)
def verify_cache(directory: Path, remove: bool) -> None:
    """Read every file and compare it with its checksums. Exit code 1 if one is damaged, 2 if the
    directory that is named is not there."""
    files = cache_inspection.runs(directory)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    damaged = 0
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("verifying", total=sum(size for _, size in files))
        for checked in cache_inspection.verify(files, remove=remove):
            progress.advance(task, checked.bytes)
            if checked.problem is not None:
                damaged += 1
                click.echo(f"{checked.path}: {checked.problem}")
    click.echo(
        f"{len(files)} files, {decimal(sum(size for _, size in files))}: {damaged or 'none'} "
        "damaged"
    )
    if damaged:
        sys.exit(DAMAGE_FOUND)


@cache.command("clear")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_of_directory
def clear_cache(directory: Path, yes: bool) -> None:
    """Remove all that is cached, of every model."""
    usage = cache_inspection.total(cache_inspection.namespaces(directory))
    if not yes:
        click.confirm(
            f"Remove {usage.files} files ({decimal(usage.bytes)}) from {directory}?", abort=True
        )
    removed = cache_inspection.clear(directory)
    click.echo(f"removed {removed.files} files ({decimal(removed.bytes)})")


def _age(seconds: float) -> str:
    for unit, length_s in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
