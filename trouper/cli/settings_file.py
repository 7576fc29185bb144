"""Settings in a file: TOML whose keys are the flags of `trouper serve`, and a table for each model that has settings of its own.

A flag counts more than a variable, a variable more than the file, the file more than a default. The file's values go to
click as its default map, which has just that place.
"""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from trouper.cli.exits import refuse
from trouper.cli.flags import HomePath, OneOfSeveral
from trouper.cli.model_tables import KEY, NO_TABLES, ModelTables, given_more, read_tables
from trouper.protocol.paths import expanded
from trouper.protocol.problems import SettingsInvalid

Command = TypeVar("Command", bound=Callable[..., Any])
IN_WORKING_DIRECTORY = Path("trouper.toml")
READ = "trouper.config"
"""Key under which click's context keeps the path of the file."""
TABLES = "trouper.models"
"""Key under which it keeps the tables of models."""


class FileInvalid(Exception):
    """A settings file that cannot be read, or has a key that is no flag. The message names the file and the key."""


def configured(command: Command) -> Command:
    """Add --config, and read the default file without it."""
    return click.option(
        "--config",
        type=HomePath(path_type=Path),
        envvar="TROUPER_CONFIG",
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_apply,
        help="Settings file (TOML, keys as the flags). Default: trouper.toml here, else ~/.config/trouper/config.toml.",
    )(command)


def file_read(context: click.Context) -> Path | None:
    """Return the settings file that this command has read, if any."""
    path: Path | None = context.meta.get(READ)
    return path


def model_tables(context: click.Context) -> ModelTables:
    """Return the tables of models in the settings file, where flags and variables count more."""
    return given_more(context, context.meta.get(TABLES, NO_TABLES))


def default_file() -> Path | None:
    """Return the file in the working directory, else the user's, else None. One that this user may not look at is none, and a line
    says so: HOME may be another user's, as after `sudo -u`."""
    user = expanded(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "trouper" / "config.toml"
    for path in (IN_WORKING_DIRECTORY, user):
        try:
            if stat.S_ISREG(path.stat().st_mode):
                return path
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            click.secho(f"trouper: {path} does not count: {error.strerror}", fg="yellow", err=True)
    return None


def _apply(context: click.Context, _: click.Parameter, given: Path | None) -> None:
    if context.resilient_parsing or (path := given or default_file()) is None:
        return
    try:
        declared = {_key(option): option for option in _options_of_serve(context)}
        content = _parsed(path)
        models = content.pop(KEY, {})
        values = _checked(path, content, declared, context)
        tables = read_tables(path, models, declared, lambda option, value: _setting_of(option, value, context))
    except (FileInvalid, SettingsInvalid) as invalid:
        refuse(str(invalid))
    if tables.tables:
        values.setdefault("model", tuple(table.path for table in tables.tables))
        context.meta[TABLES] = tables
    parameters = {parameter.name for parameter in context.command.params}
    context.default_map = {name: value for name, value in values.items() if name in parameters}
    context.meta[READ] = path


def _options_of_serve(context: click.Context) -> Iterator[click.Option]:
    """Return the options of `serve`. One file is for all commands, each of which takes what it knows; valid keys are
    those of `serve`."""
    root = context.find_root().command
    command = root.commands["serve"] if isinstance(root, click.Group) else context.command
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.expose_value and parameter.envvar:
            yield parameter


def _key(option: click.Option) -> str:
    return option.opts[0].removeprefix("--")


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise FileInvalid(f"--config {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileInvalid(f"{path} is not TOML: {error}") from error


def _checked(
    path: Path, content: Mapping[str, Any], known: Mapping[str, click.Option], context: click.Context
) -> dict[str, Any]:
    """Return the values by parameter, as click takes defaults. Raises `FileInvalid`."""
    values: dict[str, Any] = {}
    for written, value in content.items():
        key = written.replace("_", "-")
        option = known.get(key)
        if option is None or option.name is None:
            raise FileInvalid(f"{path}: there is no flag --{key}{_nearest(key, known)}")
        if option.name in values:
            raise FileInvalid(f"{path}: {key} is there twice")
        try:
            values[option.name] = _as_given(option, value)
            option.type_cast_value(context, values[option.name])
        except (ValueError, click.BadParameter) as error:
            raise FileInvalid(f"{path}: {written}: {error}") from error
    return values


def _setting_of(option: click.Option, value: Any, context: click.Context) -> Any:
    """Return what a flag would give for one model. Raises `ValueError` or `click.BadParameter`."""
    is_each = option.multiple and isinstance(option.type, OneOfSeveral)
    if is_each and isinstance(value, list):
        raise ValueError(f"must be one text, not {value!r}")
    typed = option.type_cast_value(context, _as_given(option, value))
    return typed[0] if is_each else typed


def _nearest(key: str, known: Mapping[str, click.Option]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    return f"; did you mean {near[0]}?" if near else "; `trouper serve --help` lists them"


def _as_given(option: click.Option, value: Any) -> Any:
    """Convert a value to text, as on the command line: then 8000.5 is no port, and is not rounded to 8000 silently."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {value!r}")
        return value
    if not option.multiple:
        return _text(value)
    return tuple(_text(item) for item in (value if isinstance(value, list) else [value]))


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be a text or a number, not {value!r}")  # noqa: TRY004 - as every fault of a value
    return str(value)
