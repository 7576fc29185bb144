"""`trouper models`: the models on this machine, as `serve --models-from` finds them."""

from __future__ import annotations

import json
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import attrs
import click
from rich.filesize import decimal

from trouper.cli.address import url_to
from trouper.cli.byte_lines import byte_lines
from trouper.cli.exits import refuse
from trouper.cli.model_verdicts import with_problems
from trouper.cli.terminal_text import line_shown, print_listing
from trouper.process import prepare_process
from trouper.protocol.names import EMBEDDED
from trouper.protocol.paths import encodable, expanded, is_directory
from trouper.protocol.problems import ModelUnusable, SettingsInvalid, printable
from trouper.protocol.settings import HUB_CACHE, NAMED_SOURCES, ServerSettings, require_sources
from trouper.protocol.suggested_models import SUGGESTED, no_hub_id
from trouper.storage.checkpoint_files import require_directory
from trouper.storage.model_files import ModelFiles, read_model_files
from trouper.storage.model_scan import ModelScan, directory_of, require_hub_cache


def _require_directories(
    _: click.Context, __: click.Parameter, sources: tuple[str, ...]
) -> tuple[str, ...]:
    # An empty list would hide a misspelt name.
    try:
        require_sources(sources)
        require_hub_cache(sources)
    except SettingsInvalid as invalid:
        refuse(str(invalid))
    return sources


SOURCES = click.option(
    "--models-from",
    multiple=True,
    default=NAMED_SOURCES,
    callback=_require_directories,
    metavar=f"{'|'.join(NAMED_SOURCES)}|DIR",
    show_default=True,
    help="Where to look: the hub's cache, other programs' models, or a directory of models; "
    "several.",
)
LOCAL = ServerSettings()
NAME = re.compile(r"([\w.-]{1,96}/)?[\w.:-]{1,96}")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")


@click.group()
def models() -> None:
    """List, download and remove models of this machine."""
    prepare_process()


@models.command("ls")
@SOURCES
@AS_JSON
@click.option(
    "--url",
    envvar="TROUPER_URL",
    default=url_to(LOCAL.host, LOCAL.port),
    show_default=True,
    help="Server whose models are named, too.",
)
def list_models(models_from: tuple[str, ...], as_json: bool, url: str) -> None:
    """List models: kind, size in memory, context, quantization, images, whether it fits, and where
    it comes from; and what the server serves, if one runs. GGUF is named and not served."""
    bodies = [_body(files) for files in with_problems(ModelScan(models_from).models())]
    if as_json:
        click.echo(json.dumps(bodies))
        return
    if not bodies:
        click.echo(f"no models in {', '.join(str(directory_of(source)) for source in models_from)}")
    else:
        _print_table(bodies)
    for line in _hints(url, is_empty=not bodies):
        click.echo(line_shown(f"trouper: {line}"), err=True)


def _hints(url: str, *, is_empty: bool) -> Iterator[str]:
    """Name a server's models, or how to get one. No key is sent."""
    import httpx2  # Other commands of the group do without it, and it is slow to import.

    from trouper.cli.client import ProxyUnusable, UnusableAnswer, Where, served_models

    unavailable = (httpx2.HTTPError, httpx2.InvalidURL, UnusableAnswer, ProxyUnusable)
    with suppress(*unavailable), Where(url).client() as client:
        yield f"the server at {url} has {', '.join(served_models(client))}"
    if is_empty:
        names = " or ".join(model.name for model in SUGGESTED[:2])
        yield f"`trouper models pull ID` fetches one, as {names}; without any, {EMBEDDED} is served"


def _print_table(bodies: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    several = len({body["source"] for body in bodies}) > 1
    for body in bodies:
        source = (body["source"],) if several else ()
        fits = "unusable" if body["problem"] else "yes" if body["fits"] else "no"
        shown = (
            body["kind"],
            decimal(body["memory_bytes"]),
            str(body["context_length"]),
            body["quantization"],
            "yes" if body["images"] else "no",
        )
        rows.append((body["name"], *shown, fits, *source))
    head = ("model", "kind", "memory", "context", "weights", "images", "fits")
    print_listing((*head, "from") if several else head, rows)


@models.command("info")
@click.argument("model", metavar="NAME|DIR")
@SOURCES
@AS_JSON
def model_info(model: str, models_from: tuple[str, ...], as_json: bool) -> None:
    """Describe a model by its files: one that `ls` lists, the directory of one, or the embedded
    one, as `serve --model` takes it. Exits with 2 for a model that cannot be served."""
    [files] = with_problems([_found(model, models_from)])
    body = _body(files)
    if as_json:
        click.echo(json.dumps(body))
    else:
        for name, value in body.items():
            if value != "":
                click.echo(f"{name:16}{line_shown(_shown(name, value))}")
    if files.problem:
        sys.exit(2)


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return decimal(value)
    if name.endswith("_at"):
        return datetime.fromtimestamp(value).astimezone().isoformat(" ", "seconds")
    return str(value).lower() if isinstance(value, bool) else printable(str(value))


@models.command("pull")
@click.argument("model")
@click.option("--progress", is_flag=True, hidden=True, help="For a server: bytes, as lines.")
def pull_model(model: str, progress: bool) -> None:
    """Download a model from the hub into its cache, or the embedded one: the files that `serve
    --model` would fetch."""
    from trouper.engine.loading.checkpoint import inspect
    from trouper.engine.loading.model_source import resolve, source_of

    try:
        require_hub_cache((HUB_CACHE,))
        if isinstance(source_of(model, "MODEL"), Path):
            refuse(f"{model} is no model of the hub; give its id (owner/name)")
        bar = byte_lines() if progress else None
        directory = resolve(model, lambda line: click.echo(line, err=True), flag="MODEL", bar=bar)
        found = inspect(directory)
    except (ModelUnusable, SettingsInvalid) as unusable:
        refuse(str(unusable))
    architecture = line_shown(found.architecture)
    click.echo(f"{model}: {architecture}, {decimal(found.loaded_bytes)} in memory, in {directory}")


@models.command("rm")
@click.argument("model")
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove_model(model: str, yes: bool) -> None:
    """Remove a model from the hub's cache, with all its revisions."""
    repository = directory_of(HUB_CACHE) / f"models--{model.replace('/', '--')}"
    if "--" in model or model.startswith(".") or not is_directory(repository):
        _not_there(model, (HUB_CACHE,))
    size = sum(map(_size_of, repository.rglob("*")))
    if not yes:
        click.confirm(f"Remove {model} ({decimal(size)}) from {repository.parent}?", abort=True)
    try:
        shutil.rmtree(repository)
    except OSError as error:
        refuse(f"{error.filename or repository}: {error.strerror or error}")
    click.echo(f"removed {model} ({decimal(size)})")


def _size_of(path: Path) -> int:
    """The bytes of a file of its own; 0 for one that a download has renamed meanwhile."""
    with suppress(OSError):
        if stat.S_ISREG((found := path.lstat()).st_mode):
            return found.st_size
    return 0


def _found(model: str, sources: tuple[str, ...]) -> ModelFiles:
    found = next((files for files in ModelScan(sources).models() if files.name == model), None)
    if found is not None:
        return found
    directory = expanded(model)
    if model == EMBEDDED and not is_directory(directory):
        directory = _embedded()
    elif not model or not is_directory(directory):  # An empty path is the current directory.
        _not_there(model, sources, _how_to_get(model))
    try:
        require_directory(directory)
    except ModelUnusable as unusable:
        refuse(str(unusable))
    return read_model_files(encodable(model), directory)


def _embedded() -> Path:
    from trouper.engine.loading import bundled_model

    if not bundled_model.is_here():
        refuse(
            f"{EMBEDDED}, the embedded model, is not here yet; `trouper models pull {EMBEDDED}` "
            "fetches it"
        )
    try:
        return bundled_model.directory()
    except ModelUnusable as unusable:
        refuse(str(unusable))


def _not_there(model: str, sources: tuple[str, ...], remedy: str = "") -> NoReturn:
    where = ", ".join(str(directory_of(source)) for source in sources)
    refuse(f"{model or repr('')} is not in {where}; `trouper models ls` lists what is{remedy}")


def _how_to_get(model: str) -> str:
    """A remedy for a model that is not here; "" for what is no name of a model."""
    if not NAME.fullmatch(model):
        return ""
    if "/" in model and ":" not in model:
        return f", and `trouper models pull {model}` downloads it"
    return f", and `trouper models pull ID` downloads one; {no_hub_id(model)}"


def _body(files: ModelFiles) -> dict[str, Any]:
    from trouper.engine.platform import device
    from trouper.engine.platform.device import weights_room

    in_float32 = device.is_cpu() and not files.is_foreign
    memory_bytes = files.float32_bytes if in_float32 else files.stored_bytes
    body = attrs.asdict(files) | {"directory": str(files.directory), "memory_bytes": memory_bytes}
    fits = not files.problem and 0 < memory_bytes <= weights_room()
    return body | {"fits": fits}
