"""Tables `[models."NAME"]` of the settings file. Flags and variables count more than tables,
tables more than other keys."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
from click.core import ParameterSource

from trouper.protocol.model_options import ModelOptions
from trouper.protocol.paths import expanded
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.settings import Settings

KEY = "models"
OWN_KEYS = ("path", "aliases", "pinned", "ttl-s")

# Models share the ranks, the device and the disk.
OF_THE_PROCESS = {
    *(
        "model",
        "control_host",
        "rank_secret_file",
        "rank_timeout_s",
        "collective_timeout_s",
        "pipeline",
        "tp_reduce_dtype",
    ),
    *(
        "memory_fraction",
        "buffer_cache",
        "ssd_max_bytes",
        "ssd_keep_free",
        "ssd_write_budget",
        "ssd_ttl_days",
    ),
}

# Models have equal shares, but for those whose tables have the setting.
OWN_MEMORY = frozenset({"cache_memory", "kv_memory"})
DRAFT = "draft_model"  # The flag overrides no other model's.
WILDCARDS = "*?["
Convert = Callable[[click.Option, Any], Any]
"""Raises `ValueError` or `click.BadParameter`."""


@attrs.frozen
class ModelTable:
    name: str
    path: str
    aliases: tuple[str, ...]  # Further names, or patterns of names
    options: ModelOptions
    values: Mapping[str, Any]  # By field

    def names(self) -> Iterator[str]:
        for name in (self.name, *self.aliases):
            if name != self.path and not is_pattern(name):
                yield f"{name}={self.path}"

    def patterns(self) -> Iterator[str]:
        """Entries of --model-alias"""
        yield from (f"{alias}={self.name}" for alias in self.aliases if is_pattern(alias))


@attrs.frozen
class ModelTables:
    file: Path | None = None
    tables: tuple[ModelTable, ...] = ()
    given: Collection[str] = ()
    """Settings of flags or variables, which count more"""

    def of(self, model: str | None) -> ModelTable | None:
        found = [table for table in self.tables if model in (table.name, table.path)]
        return found[0] if found else None

    def values(self, model: str | None) -> dict[str, Any]:
        table = self.of(model)
        if table is None:
            return {}
        return {
            name: each
            for name, each in table.values.items()
            if name not in self.given or name == DRAFT
        }

    def checked(self, model: str | None, make: Callable[[], Settings]) -> Settings:
        """Raises `SettingsInvalid`, which names a faulty table."""
        try:
            return make()
        except SettingsInvalid as invalid:
            if not (values := self.values(model)) or (
                invalid.flag and invalid.flag.removeprefix("--").replace("-", "_") not in values
            ):
                raise
            raise SettingsInvalid(f"{_where(self.file, self.of(model))}: {invalid}", None) from None

    def of_all(self, models: Sequence[str | None]) -> list[ModelTable]:
        return [table for table in map(self.of, models) if table is not None]

    def options(self, models: Sequence[str | None]) -> dict[str, ModelOptions]:
        return {
            table.path: attrs.evolve(
                table.options, own_memory=OWN_MEMORY.intersection(self.values(table.path))
            )
            for table in self.of_all(models)
        }

    def names(self, models: Sequence[str | None]) -> list[str]:
        return [name for table in self.of_all(models) for name in table.names()]

    def patterns(self, models: Sequence[str | None]) -> list[str]:
        return [pattern for table in self.of_all(models) for pattern in table.patterns()]


NO_TABLES = ModelTables()


def is_pattern(alias: str) -> bool:
    return any(sign in alias for sign in WILDCARDS)


def read_tables(
    file: Path, content: Any, known: Mapping[str, click.Option], convert: Convert
) -> ModelTables:
    """`known`: flags of `serve`, by key. Raises `SettingsInvalid`, which names table and key."""
    if not isinstance(content, Mapping):
        raise SettingsInvalid(f'{file}: {KEY} must be tables, as [models."NAME"]')
    settings = {
        key: option for key, option in known.items() if option.name in attrs.fields_dict(Settings)
    }
    tables = [_table(file, name, entries, settings, convert) for name, entries in content.items()]
    _require_unique(file, tables)
    return ModelTables(file, tuple(tables))


def given_more(context: click.Context, tables: ModelTables) -> ModelTables:
    sources = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return attrs.evolve(
        tables,
        given={name for name in context.params if context.get_parameter_source(name) in sources},
    )


def _table(
    file: Path, name: str, entries: Any, settings: Mapping[str, click.Option], convert: Convert
) -> ModelTable:
    where = f'{file}: [models."{name}"]'
    if not isinstance(entries, Mapping):
        raise SettingsInvalid(f"{where} must be a table of keys, not {entries!r}")
    if not name.strip():
        raise SettingsInvalid(f"{where} has no name; give the name that requests send")
    own: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for written, value in entries.items():
        key = written.replace("_", "-")
        if key in own or (key in settings and settings[key].name in values):
            raise SettingsInvalid(f"{where}: {key} is there twice; leave one out")
        try:
            if key in OWN_KEYS:
                own[key] = _own(key, value)
            else:
                option = _setting(key, settings)
                values[str(option.name)] = convert(option, value)
        except (ValueError, click.BadParameter) as error:
            raise SettingsInvalid(f"{where}: {written}: {error}") from error
    options = ModelOptions(pinned=own.get("pinned", False), ttl_s=own.get("ttl-s"))
    return ModelTable(name, own.get("path", name), own.get("aliases", ()), options, values)


def _own(key: str, value: Any) -> Any:
    """Check a key that only tables have: path, aliases, pinned, or a time. Raises `ValueError`."""
    match key, value:
        case "path", str() if value.strip():
            return str(expanded(value)) if value.startswith("~") else value
        case "path", _:
            raise ValueError(f"must be a directory or a hub id, not {value!r}")
        case "aliases", str() if value.strip():
            return (value,)
        case "aliases", list() if all(isinstance(each, str) and each.strip() for each in value):
            return tuple(value)
        case "aliases", _:
            raise ValueError(f"must be a name or a list of names, not {value!r}")
        case "pinned", bool():
            return value
        case "pinned", _:
            raise ValueError(f"must be true or false, not {value!r}")
        case _, int() | float() if not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
            return float(value)
        case _:
            raise ValueError(f"must be a number of seconds, 0 for never, not {value!r}")


def _setting(key: str, settings: Mapping[str, click.Option]) -> click.Option:
    """Raises `ValueError` for a key that no model can have."""
    option = settings.get(key)
    if option is None:
        names = [
            *OWN_KEYS,
            *(name for name, each in settings.items() if each.name not in OF_THE_PROCESS),
        ]
        near = difflib.get_close_matches(key, names, 1)
        hint = f"did you mean {near[0]}?" if near else "docs/flags.md lists the keys of a model"
        raise ValueError(f"no model has this setting; {hint}")
    if option.name in OF_THE_PROCESS:
        remedy = "write path" if key == "model" else "write it above all tables"
        raise ValueError(f"cannot differ between models; {remedy}")
    return option


def _require_unique(file: Path, tables: Sequence[ModelTable]) -> None:
    taken: dict[str, str] = {}
    for table in tables:
        for what in dict.fromkeys((table.name, table.path, *table.aliases)):
            if (other := taken.setdefault(what, table.name)) != table.name:
                message = (
                    f"{what!r} stands for {other} already; give each model a path and names of its "
                    "own"
                )
                raise SettingsInvalid(f"{_where(file, table)}: {message}")


def _where(file: Path | None, table: ModelTable | None) -> str:
    return f'{file}: [models."{table.name if table else ""}"]'
