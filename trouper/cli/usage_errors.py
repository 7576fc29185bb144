"""Usage errors in one line: flag, fault, and source of the value."""

from __future__ import annotations

import difflib
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click
from click.core import ParameterSource
from click.exceptions import NoSuchCommand

from trouper.cli.exits import INTERRUPTED, escape_unencodable, forget, refuse
from trouper.cli.foreign_flags import NameOfAnother
from trouper.cli.settings_file import file_read, written_key
from trouper.protocol.problems import SettingsInvalid

CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # click handles EPIPE.


class OneLineErrors(click.Group):
    """A group with errors of one line, where click prints four."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if os.environ.get("NO_COLOR"):
            ctx.color = False  # Commands inherit it.
        escape_unencodable()
        with _one_line(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _one_line(ctx):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)


@contextmanager
def _one_line(group: click.Context) -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        _refuse(error, group)
    except SettingsInvalid as invalid:
        refuse(str(invalid))
    except OSError as error:
        if error.errno not in CANNOT_WRITE or error.filename is not None:
            raise
        forget(sys.stdout)
        refuse(f"the output cannot be written: {error.strerror}")


def _refuse(error: click.UsageError, group: click.Context) -> NoReturn:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        raise error
    command = (
        error.ctx.command_path
        if error.ctx
        else f"{group.command_path} {group.invoked_subcommand or ''}".strip()
    )
    refuse(message_of(error, command))


def message_of(error: click.UsageError, command: str) -> str:
    """`command`: has help about the error."""
    match error:
        case NameOfAnother():
            return error.message
        case click.NoSuchOption():
            near = _nearest(error)
            remedy = f"did you mean {near}?" if near else f"`{command} --help` lists them"
            return f"there is no flag {error.option_name}; {remedy}"
        case NoSuchCommand(ctx=click.Context(command=click.Group() as group) as context):
            remedy = _commands_like(error, group, context)
            return f"there is no command {error.command_name}; {remedy}"
        case click.BadParameter(param=click.Option() as option) if not isinstance(
            error, click.MissingParameter
        ):
            return f"{option.opts[0]}: {_plain(error.message)}{_origin(error.ctx, option)}"
        case _:
            return f"{_plain(error.format_message())}; see `{command} --help`"


def _commands_like(error: NoSuchCommand, group: click.Group, context: click.Context) -> str:
    names = group.list_commands(context)
    if near := difflib.get_close_matches(error.command_name, names, 1):
        return f"did you mean {near[0]}?"
    return f"`{context.command_path}` has {', '.join(names)}"


def _nearest(error: click.NoSuchOption) -> str:
    # click compares the dashes, too, by which --nope would be near --model.
    names = {name.lstrip("-"): name for name in error.possibilities or ()}
    near = difflib.get_close_matches(error.option_name.lstrip("-"), names, 1)
    return names[near[0]] if near else ""


def settings_error(context: click.Context, invalid: SettingsInvalid) -> str:
    """Describe an invalid setting, with the source of a flag's value."""
    options = (
        option
        for option in context.command.params
        if isinstance(option, click.Option) and invalid.flag in option.opts
    )
    option = next(options, None)
    return f"{invalid}{'' if option is None else _origin(context, option)}"


def origin(context: click.Context, option: click.Option) -> str | None:
    """Return the variable or file of a value; None: a flag or a default."""
    match context.get_parameter_source(option.name or ""):
        case ParameterSource.ENVIRONMENT:
            return str(option.envvar)
        case ParameterSource.DEFAULT_MAP:
            return str(file_read(context))
        case _:
            return None


def origin_of(context: click.Context, name: str) -> str:
    """Return the flag, the variable, or file and key of a value."""
    option = next(each for each in context.command.params if each.name == name)
    assert isinstance(option, click.Option), "arguments have no other source"
    if context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
        return f"{file_read(context)}: {written_key(context, name)}"
    return origin(context, option) or option.opts[0]


def _origin(context: click.Context | None, option: click.Option) -> str:
    came_from = None if context is None else origin(context, option)
    return f" (from {came_from})" if came_from else ""


def _plain(message: str) -> str:
    return " ".join(message.split()).rstrip(".")
