"""`trouper serve --print-config`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import click
from click.core import ParameterSource

from trouper import __version__
from trouper.cli.flag_groups import HELP_ORDER
from trouper.cli.model_tables import ModelTable, ModelTables
from trouper.cli.settings_file import file_read, model_tables
from trouper.cli.terminal_text import BREAKS, line_shown
from trouper.cli.usage_errors import origin_of
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.settings import ServerSettings, Settings

SECRET = {
    field.name
    for cls in (Settings, ServerSettings)
    for field in attrs.fields(cls)
    if field.metadata.get("secret")
}


def config_text(context: click.Context) -> str:
    """Format the settings as TOML, with defaults as comments and without secrets."""
    return "\n".join(_lines(context)) + "\n"


def _lines(context: click.Context) -> Iterator[str]:
    path = file_read(context)
    yield (
        f"# trouper {__version__}: what `trouper serve` would run with. Lines that are comments "
        "are defaults."
    )
    read = line_shown(str(path or "none"))
    default = "trouper.toml here or ~/.config/trouper/config.toml"
    yield f"# Read by --config FILE; without it {default}. Now: {read}."
    last = len(HELP_ORDER)
    for parameter in sorted(
        context.command.params, key=lambda each: HELP_ORDER.get(each.name or "", last)
    ):
        if (
            isinstance(parameter, click.Option)
            and parameter.name in context.params
            and parameter.envvar
        ):
            yield ""
            if parameter.help:
                yield f"# {parameter.help}"
            yield _line(context, parameter)
    tables = model_tables(context)
    for table in tables.of_all(context.params.get("model", ())):
        yield ""
        yield from _table_lines(table, tables)


def _table_lines(table: ModelTable, tables: ModelTables) -> Iterator[str]:
    """Format a model's table without settings that a flag or variable overrides."""
    yield f"[models.{_toml(table.name)}]  # {line_shown(str(tables.file))}"
    yield f"path = {_toml(table.path)}"
    if table.aliases:
        yield f"aliases = {_toml(table.aliases)}"
    if table.options.pinned:
        yield "pinned = true"
    if table.options.ttl_s is not None:
        yield f"ttl-s = {_toml(table.options.ttl_s)}"
    for name, value in tables.values(table.name).items():
        yield f"{name.replace('_', '-')} = {_toml(value)}"


def _line(context: click.Context, option: click.Option) -> str:
    assert option.name is not None, "click names each"
    key, value = option.opts[0].removeprefix("--"), context.params[option.name]
    source = context.get_parameter_source(option.name)
    if source in (None, ParameterSource.DEFAULT):
        return f"# {key} = {'' if value is None else _toml(value)}".rstrip()
    is_flag = source is ParameterSource.COMMANDLINE
    came_from = line_shown("flag" if is_flag else origin_of(context, option.name))
    if option.name in SECRET:
        return f"# {key} = (not shown)  # {came_from}"
    return f"{key} = {_toml(value)}  # {came_from}"


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case ByteSize() | Path():
            return _toml(str(value))
        case int() | float():
            return repr(value)
        case tuple() | list():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
        case _:  # A JSON string is a TOML string, but for characters that a terminal obeys.
            text = json.dumps(str(value), ensure_ascii=False)
            return BREAKS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
