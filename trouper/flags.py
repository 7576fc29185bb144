"""Command-line flags from settings: each setting is written once, in `protocol.settings`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import attrs
import click

Command = TypeVar("Command", bound=Callable[..., Any])
S = TypeVar("S", bound=attrs.AttrsInstance)


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
