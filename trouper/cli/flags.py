"""Command-line flags made from the settings classes, and settings made from parsed flags."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import attrs
import click
from click.shell_completion import CompletionItem

from trouper.protocol.names import EMBEDDED, draft_models, require_adapters, require_aliases, require_names
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.settings import ServerSettings, Settings

Command = TypeVar("Command", bound=Callable[..., Any])
Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
S = TypeVar("S", bound=attrs.AttrsInstance)


def flags_of(cls: type[attrs.AttrsInstance]) -> Callable[[Command], Command]:
    """Add a flag, and a variable TROUPER_<NAME>, for each setting: type, default and help are the setting's own."""

    def add(command: Command) -> Command:
        types = get_type_hints(cls)
        for field in reversed(attrs.fields(cls)):
            command = flag(field, types[field.name])(command)
        return command

    return add


def flag(field: attrs.Attribute[Any], hint: Any) -> Callable[[Command], Command]:
    kind = next(part for part in (get_args(hint) or (hint,)) if part not in (NoneType, Ellipsis))
    choices = field.metadata.get("choices")
    each, repeated = bool(field.metadata.get("each")), get_origin(hint) is tuple
    return click.option(
        "--" + field.name.replace("_", "-"),
        field.name,
        type=_type(kind, each=each, repeated=repeated),
        is_flag=kind is bool,
        multiple=each or repeated,
        default=() if each else field.default,
        envvar=f"TROUPER_{field.name.upper()}",
        metavar=f"[{'|'.join(map(str, choices))}]" if choices else None,
        shell_complete=_completion(field),
        help=field.metadata["help"],
        show_default=field.default not in (None, False, ()),
        show_envvar=bool(field.metadata.get("secret")),
    )


def _type(kind: Any, *, each: bool, repeated: bool) -> Any:
    if kind is Path:
        return click.Path(path_type=Path)
    return OneOfSeveral() if each else UnsplitText() if repeated else kind


def _completion(field: attrs.Attribute[Any]) -> Completion | None:
    """Return what a shell completes. Choices are checked by the setting itself, whatever its source, so click does not
    check them."""
    if choices := field.metadata.get("choices"):
        return lambda _context, _option, begun: [
            CompletionItem(str(choice)) for choice in choices if str(choice).startswith(begun)
        ]
    if field.metadata.get("directory"):
        return lambda _context, _option, begun: [CompletionItem(begun, type="dir")]
    return None


class UnsplitText(click.types.StringParamType):
    """Text that is one value in a variable: click would split it at blanks, and make weak keys of a strong one."""

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return (rv,)


class OneOfSeveral(click.types.StringParamType):
    """Text whose variable holds several values, separated like paths: a model may be a directory with blanks in its
    name."""

    envvar_list_splitter = os.pathsep


class Finite(click.FloatRange):
    """A finite number. nan, which is within every range, and infinity are refused."""

    def convert(self, value: float, param: click.Parameter | None, context: click.Context | None) -> float:
        number = super().convert(value, param, context)
        if not math.isfinite(number):
            self.fail(f"{value} is no number.", param, context)
        return number


def settings_from(cls: type[S], given: Mapping[str, Any], **overrides: Any) -> S:
    """Build the settings of what click collected and of `overrides`, which holds the flags that differ between models.
    Raises `SettingsInvalid`."""
    return cls(**{field.name: overrides.get(field.name, given[field.name]) for field in attrs.fields(cls)})


def models_from(given: Mapping[str, Any]) -> list[Settings]:
    """Build the settings for each --model. Raises `SettingsInvalid`."""
    models = tuple(dict.fromkeys(given["model"]))
    if len(models) > 1 and given["adapter_path"] is not None:
        raise SettingsInvalid("--adapter-path is for one model: give one --model with it")
    drafts = draft_models(models or (EMBEDDED,), given["draft_model"] or ())
    return [
        settings_from(Settings, given, model=model, draft_model=drafts.get(model or EMBEDDED))
        for model in models or (None,)
    ]


def all_from(given: Mapping[str, Any]) -> tuple[list[Settings], ServerSettings]:
    """Build the settings of the models and of the server. Raises `SettingsInvalid`."""
    models, server = models_from(given), settings_from(ServerSettings, given)
    names = [model.model or EMBEDDED for model in models]
    require_names(names, server.served_model_name)
    require_adapters(names, server.served_model_name, models[0].adapter)
    require_aliases(names, server.served_model_name, server.model_alias)
    return models, server
