"""Settings in TOML, by the flags of `trouper serve`. A variable counts more than the file."""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import click

from trouper.cli.exits import refuse
from trouper.cli.flags import HomePath, OneOfSeveral
from trouper.cli.foreign_flags import of_others
from trouper.cli.model_tables import KEY, NO_TABLES, ModelTables, given_more, read_tables
from trouper.cli.terminal_text import line_shown
from trouper.protocol.hosts import is_loopback
from trouper.protocol.paths import expanded, is_file, xdg_directory
from trouper.protocol.private_files import others_write, user_of
from trouper.protocol.problems import SettingsInvalid

Command = TypeVar("Command", bound=Callable[..., Any])
IN_WORKING_DIRECTORY = Path("trouper.toml")
# Keys of click's context: the path of the file, the keys as written by parameter, the tables.
READ = "trouper.config"
KEYS = "trouper.config.keys"
TABLES = "trouper.models"


class FileInvalid(Exception):
    """The message names file and key."""


@attrs.frozen
class SettingsText:
    """`unnamed_here`: the working directory's, without --config"""

    path: Path
    content: bytes
    unnamed_here: bool = False


def configured(command: Command, *, works_here: bool = False) -> Command:
    """Add --config. `works_here`: the working directory's file is a default, too."""
    default = "trouper.toml here, else ~/.config/trouper/config.toml"
    return click.option(
        "--config",
        type=HomePath(path_type=Path),
        envvar="TROUPER_CONFIG",
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=partial(_apply, works_here=works_here),
        help="Settings file (TOML, keys as the flags of `serve`). "
        f"Default: {default if works_here else default.partition('else ')[2]}.",
    )(command)


def only_this(context: click.Context) -> tuple[str, ...]:
    """Return the flags that make `trouper serve` read this command's settings file, or none."""
    return ("--config", str(file_read(context) or os.devnull))


def file_read(context: click.Context) -> Path | None:
    path: Path | None = context.meta.get(READ)
    return path


def written_key(context: click.Context, name: str) -> str:
    return str(context.meta[KEYS][name])


def model_tables(context: click.Context) -> ModelTables:
    return given_more(context, context.meta.get(TABLES, NO_TABLES))


def default_file(*, works_here: bool) -> SettingsText | None:
    """Return the file of the working directory, else the user's, else None."""
    for path in (*((IN_WORKING_DIRECTORY,) if works_here else ()), *_of_the_user()):
        try:
            if (content := read_trusted(path)) is not None:
                return SettingsText(path, content, unnamed_here=path == IN_WORKING_DIRECTORY)
        except FileNotTrusted as error:
            _warn(f"{path} does not count: {error}")
        except OSError as error:
            _warn(f"{path} does not count: {error.strerror}")
    return None


def _of_the_user() -> Iterator[Path]:
    named = os.environ.get("XDG_CONFIG_HOME")
    if named and not expanded(named).is_absolute():
        _warn(f"XDG_CONFIG_HOME={named} does not count: it is no absolute path")
    with suppress(SettingsInvalid):  # A user without a home has no file.
        yield xdg_directory("XDG_CONFIG_HOME", ".config") / "trouper" / "config.toml"


def _warn(message: str) -> None:
    click.secho(f"trouper: {line_shown(message)}", fg="yellow", err=True)


def _apply(
    context: click.Context, _: click.Parameter, given: Path | None, *, works_here: bool
) -> None:
    """Take the settings of --config or a default file, and print which, but for `serve`."""
    if context.resilient_parsing:
        return
    if given is None and not works_here and is_file(IN_WORKING_DIRECTORY):
        alone = "is for `trouper serve` alone; another command reads it by --config"
        _warn(f"{IN_WORKING_DIRECTORY} here {alone}")
    try:
        file = default_file(works_here=works_here) if given is None else _named(given)
        if file is not None:
            _take(context, file)
    except (FileInvalid, SettingsInvalid) as invalid:
        refuse(str(invalid))
    if context.default_map and not works_here:  # `serve` logs it.
        written = context.meta[KEYS]
        keys = ", ".join(written[name] for name in context.default_map)
        click.echo(f"trouper: {line_shown(f'settings of {file_read(context)}: {keys}')}", err=True)


def _take(context: click.Context, file: SettingsText) -> None:
    """Raises `FileInvalid` and `SettingsInvalid`."""
    path, content = file.path, _parsed(file)
    declared = {_key(option): option for option in _options_of_serve(context)}
    models = content.pop(KEY, {})
    values = _checked(path, content, declared, context)
    convert = partial(_setting_of, context=context)
    tables = read_tables(path, models, declared, convert)
    if file.unnamed_here:
        _require_harmless(path, values, tables)
    keys = {str(declared[key.replace("_", "-")].name): key for key in content}
    if tables.tables:
        values.setdefault("model", tuple(table.path for table in tables.tables))
        keys.setdefault("model", f"[{KEY}]")
        context.meta[TABLES] = tables
    parameters = {parameter.name for parameter in context.command.params}
    context.default_map = {name: value for name, value in values.items() if name in parameters}
    context.meta[READ], context.meta[KEYS] = path, keys


def _require_harmless(path: Path, values: Mapping[str, Any], tables: ModelTables) -> None:
    """Raises `FileInvalid`."""
    of_models = ((f'[models."{table.name}"]: ', table.values) for table in tables.tables)
    for where, found in (("", values), *of_models):
        for name, reason in refused_here(path, found):
            raise FileInvalid(f"{path}: {where}{name.replace('_', '-')} {reason}")


def _options_of_serve(context: click.Context) -> Iterator[click.Option]:
    # One file is for all commands, so valid keys are those of `serve`.
    root, command = context.find_root(), context.command
    if isinstance(root.command, click.Group):
        command = root.command.get_command(root, "serve") or command
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.expose_value and parameter.envvar:
            yield parameter


def _key(option: click.Option) -> str:
    return option.opts[0].removeprefix("--")


TO_BEGIN_WITH = "`trouper serve --print-config` prints one to begin with"


def _named(path: Path) -> SettingsText:
    try:
        return SettingsText(path, path.read_bytes())
    except FileNotFoundError as error:
        raise FileInvalid(f"--config {path}: {error.strerror}; {TO_BEGIN_WITH}") from error
    except OSError as error:
        raise FileInvalid(f"--config {path}: {error.strerror or error}") from error


def _parsed(file: SettingsText) -> dict[str, Any]:
    try:
        return tomllib.loads(file.content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # Also of a number of thousands of digits.
        raise FileInvalid(f"{file.path} is not TOML: {error}; {TO_BEGIN_WITH}") from error


def _checked(
    path: Path,
    content: Mapping[str, Any],
    known: Mapping[str, click.Option],
    context: click.Context,
) -> dict[str, Any]:
    """Return the values by parameter, as click takes defaults. Raises `FileInvalid`."""
    values: dict[str, Any] = {}
    for written, value in content.items():
        key = written.replace("_", "-")
        option = known.get(key)
        if option is None or option.name is None:
            raise FileInvalid(f"{path}: {_unknown(key, known)}")
        if option.name in values:
            raise FileInvalid(f"{path}: {key} is there twice")
        try:
            values[option.name] = _as_given(option, value)
            option.type_cast_value(context, values[option.name])
        except (ValueError, click.BadParameter) as error:
            raise FileInvalid(f"{path}: {written}: {error}") from error
    return values


def _setting_of(option: click.Option, value: Any, context: click.Context) -> Any:
    """Raises `ValueError` or `click.BadParameter`."""
    is_each = option.multiple and isinstance(option.type, OneOfSeveral)
    if is_each and isinstance(value, list):
        raise ValueError(f"must be one text, not {value!r}")
    typed = option.type_cast_value(context, _as_given(option, value))
    return typed[0] if is_each else typed


def _unknown(key: str, known: Mapping[str, click.Option]) -> str:
    if meant := of_others(f"--{key}"):
        return meant
    near = difflib.get_close_matches(key, known, 1)
    remedy = f"did you mean {near[0]}?" if near else "`trouper serve --help` lists them"
    return f"there is no key {key}; {remedy}"


def _as_given(option: click.Option, value: Any) -> Any:
    # click would round the number 8000.5 to a port, but refuses the text.
    if option.is_flag:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {value!r}")
        return value
    if not option.multiple:
        return _text(value)
    return tuple(_text(item) for item in (value if isinstance(value, list) else [value]))


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        # As every fault of a value
        raise ValueError(f"must be a text or a number, not {value!r}")  # noqa: TRY004
    return str(value)


# A working directory may be a stranger's, whose settings would open the server, name secrets or
# files, send prompts elsewhere, or let texts open turns.
NEVER_HERE = frozenset(
    {
        *("api_key", "api_key_file", "allow_no_key", "allow_admin_without_key", "allowed_hosts"),
        *("cors_origins", "ssd_cache_dir", "batch_dir", "otlp_endpoint", "adapters_from"),
        *("rank_secret_file", "special_tokens_in_content", "allowed_media_domains"),
    }
)
LOOPBACK_HERE = frozenset({"host", "control_host"})
NOT_TAKEN = "is not taken from the working directory"


class FileNotTrusted(Exception):
    """The message says why."""


def read_trusted(path: Path) -> bytes | None:
    """Return a file that this user and root alone can have written; None: no file. Raises
    `FileNotTrusted` and `OSError`."""
    try:
        link = path.lstat()
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            status = os.fstat(file.fileno())  # Of what is read, whatever takes its place.
            for owner in (link.st_uid, status.st_uid):
                if owner not in (0, os.geteuid()):
                    raise FileNotTrusted(f"{user_of(owner)} owns it; {_by_name(path)}")
            if others_write(status):
                raise FileNotTrusted(f"others may write to it; `chmod go-w`, or {_by_name(path)}")
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def refused_here(path: Path, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield forbidden settings, each with the reason."""
    for name, value in values.items():
        if name in NEVER_HERE:
            yield name, f"{NOT_TAKEN}; {_by_name(path)}"
        elif name in LOOPBACK_HERE and not is_loopback(str(value)):
            yield name, f"{value} is no loopback address, and {NOT_TAKEN}; {_by_name(path)}"


def _by_name(path: Path) -> str:
    return f"name the file by --config {path} if you trust it"
