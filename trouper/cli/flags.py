"""Flags made from the settings classes, and settings made from flags."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import attrs
import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from trouper import workarounds
from trouper.cli.model_tables import NO_TABLES, ModelTables
from trouper.protocol.names import (
    EMBEDDED,
    draft_models,
    require_adapters,
    require_aliases,
    require_names,
)
from trouper.protocol.paths import expanded
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.settings import ServerSettings, Settings

Command = TypeVar("Command", bound=Callable[..., Any])
Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
S = TypeVar("S", bound=attrs.AttrsInstance)
MODELS = click.argument(
    "models",
    metavar="[MODEL]...",
    nargs=-1,
    shell_complete=lambda _context, _argument, begun: [CompletionItem(begun, type="dir")],
)


def add_models(
    context: click.Context, models: tuple[str, ...], values: MutableMapping[str, Any]
) -> None:
    """Take arguments as values of --model on the command line."""
    if models:
        has_flag = context.get_parameter_source("model") is ParameterSource.COMMANDLINE
        others = values["model"] if has_flag else ()
        values["model"] = context.params["model"] = (*models, *others)
        context.set_parameter_source("model", ParameterSource.COMMANDLINE)


def flags_of(cls: type[attrs.AttrsInstance]) -> Callable[[Command], Command]:
    """Add a flag and a variable TROUPER_<NAME> for each setting."""

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
        cls=NeverEmpty if field.metadata.get("never_empty") else click.Option,
        type=OwnChoice() if choices and kind is int else _type(kind, each=each, repeated=repeated),
        is_flag=kind is bool,
        multiple=each or repeated,
        default=() if each else field.default,
        envvar=f"TROUPER_{field.name.upper()}",
        metavar=field.metadata.get("metavar") or _metavar(kind, choices),
        shell_complete=_completion(field),
        help=field.metadata["help"],
        show_default=field.default not in (None, False, ()),
        show_envvar=bool(field.metadata.get("secret")),
    )


def _metavar(kind: Any, choices: Sequence[Any] | None) -> str | None:
    if choices:
        return f"[{'|'.join(map(str, choices))}]"
    return "SIZE" if kind is ByteSize else None


def _type(kind: Any, *, each: bool, repeated: bool) -> Any:
    if kind is Path:
        return HomePath(path_type=Path)
    return OneOfSeveral() if each else UnsplitText() if repeated else kind


def _completion(field: attrs.Attribute[Any]) -> Completion | None:
    # The setting checks choices, whatever their source, so click does not.
    if choices := field.metadata.get("choices"):
        return lambda _context, _option, begun: [
            CompletionItem(str(choice)) for choice in choices if str(choice).startswith(begun)
        ]
    if field.metadata.get("directory"):
        return lambda _context, _option, begun: [CompletionItem(begun, type="dir")]
    return None


class NeverEmpty(click.Option):
    """An option whose empty variable counts: without keys the server would be open."""

    # Click's interface
    def resolve_envvar_value(self, ctx: click.Context) -> str | None:  # noqa: ARG002
        return os.environ.get(str(self.envvar))


class UnsplitText(click.types.StringParamType):
    """click splits at blanks, and would make weak keys of a strong one."""

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return (rv,)


class OwnChoice(click.types.StringParamType):
    """A number. For words the setting's error lists the choices."""

    name = "choice"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,  # noqa: ARG002 - Click's interface
        context: click.Context | None,  # noqa: ARG002
    ) -> Any:
        try:
            return int(str(value))
        except ValueError:
            return value


class OneOfSeveral(click.types.StringParamType):
    """A model may be a directory with blanks in the name."""

    envvar_list_splitter = os.pathsep


class HomePath(click.Path):
    """A shell expands ~ neither in `--flag=~/x` nor in a file."""

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> Any:
        # Else the current directory would be meant, as by an unset variable of a script.
        if not os.fspath(value):
            self.fail("it is empty; give a path, or leave the flag out.", param, context)
        path = expanded(os.fspath(value))
        if str(path).startswith("~"):
            self.fail(
                f"no home directory is known for {path.parts[0]}; write the path out.",
                param,
                context,
            )
        return super().convert(str(path), param, context)


class Finite(click.FloatRange):
    """A finite number; nan is within every range."""

    name = "number"

    def convert(
        self, value: float, param: click.Parameter | None, context: click.Context | None
    ) -> float:
        number = super().convert(value, param, context)
        if not math.isfinite(number):
            self.fail(f"{value} is no number.", param, context)
        return number


def settings_from(cls: type[S], given: Mapping[str, Any], **overrides: Any) -> S:
    """`overrides`: one model's flags. Raises `SettingsInvalid`."""
    return cls(
        **{field.name: overrides.get(field.name, given[field.name]) for field in attrs.fields(cls)}
    )


def models_from(given: Mapping[str, Any], tables: ModelTables = NO_TABLES) -> list[Settings]:
    """Raises `SettingsInvalid`."""
    models = tuple(dict.fromkeys(_path(model, tables) for model in given["model"]))
    for field in ("adapter_path", "adapter"):
        if len(models) > 1 and given.get(field):
            flag = "--" + field.replace("_", "-")
            remedy = (
                "give one --model with it, or write it into the model's table of a settings file, "
                '[models."NAME"]'
            )
            raise SettingsInvalid(f"{flag} is for one model: {remedy}", flag)
    drafts = draft_models(models or (EMBEDDED,), given["draft_model"] or ())

    def settings_of(model: str | None) -> Settings:
        own = tables.values(model)
        draft = drafts.get(model or EMBEDDED, own.get("draft_model"))
        return settings_from(Settings, given, **own | {"model": model, "draft_model": draft})

    return [tables.checked(model, partial(settings_of, model)) for model in models or (None,)]


def all_from(
    given: Mapping[str, Any], tables: ModelTables = NO_TABLES
) -> tuple[list[Settings], ServerSettings]:
    """Raises `SettingsInvalid`."""
    models = models_from(given, tables)
    paths = [model.model for model in models]
    served = [_served(name, tables) for name in given["served_model_name"]]
    server = settings_from(
        ServerSettings,
        given,
        served_model_name=(*served, *tables.names(paths)),
        model_alias=(*given["model_alias"], *tables.patterns(paths)),
    )
    names = [path or EMBEDDED for path in paths]
    require_names(names, server.served_model_name)
    for model in models:
        require_adapters(names, server.served_model_name, model.adapter)
    require_aliases(names, server.served_model_name, server.model_alias)
    return models, server


def _path(model: str, tables: ModelTables) -> str:
    table = tables.of(model)
    return model if table is None else table.path


def _served(name: str, tables: ModelTables) -> str:
    """Return an entry of --served-model-name with a path in place of a table's name."""
    own, given, model = name.partition("=")
    return f"{own}={_path(model, tables)}" if given else name


PREFIX = "TROUPER_"
ALIKE = 0.85  # Less similar variables belong to other programs.


def misspelt(context: click.Context, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield unknown variables, each with the one that was probably meant."""
    variables = {workarounds.VARIABLE, *_variables(context.command)}
    others = sorted(
        name for name in environment if name.startswith(PREFIX) and name not in variables
    )
    if not others:
        return  # To import every command takes a quarter of a server's start.
    root = context.find_root()
    variables.update(v for command in _commands(root, root.command) for v in _variables(command))
    for name in others:
        if name not in variables and (near := difflib.get_close_matches(name, variables, 1, ALIKE)):
            yield name, near[0]


def _commands(context: click.Context, command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if (below := command.get_command(context, name)) is not None:
                yield from _commands(context, below)


def _variables(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        match parameter.envvar:
            case str(name):
                yield name
            case None:
                pass
            case several:
                yield from several
