"""A group whose commands are imported when they are called:
https://click.palletsprojects.com/en/stable/complex/#lazily-loading-subcommands"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import click
from click.exceptions import NoSuchCommand
from click.shell_completion import CompletionItem

from trouper.cli.exits import refuse
from trouper.cli.foreign_flags import NameOfAnother
from trouper.cli.usage_errors import OneLineErrors


class LazyGroup(OneLineErrors):
    """A group with three sources of commands; an earlier source wins over a later one.

    `lazy_commands`: the module of each command, in which the command has its own name.
    `short_helps`: the lines of commands in lists; a command without one is imported for it.
    `entry_points`: the group of entry points by which installed packages add commands.
    `installed_by`: for commands of packages that may be absent, how to install each.
    `foreign_commands`: commands of other programs, and what to do instead.
    """

    def __init__(
        self,
        *args: Any,
        lazy_commands: Mapping[str, str],
        short_helps: Mapping[str, str] | None = None,
        entry_points: str = "",
        installed_by: Mapping[str, str] | None = None,
        foreign_commands: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._modules = dict(lazy_commands)
        self._short_helps = dict(short_helps or {})
        self._entry_points = entry_points
        self._installed_by = dict(installed_by or {})
        self._foreign_commands = dict(foreign_commands or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = {*super().list_commands(ctx), *self._modules, *self._installed_by}
        return sorted(names | {entry.name for entry in self._read_entry_points()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        if cmd_name in self._modules:
            command = getattr(import_module(self._modules[cmd_name]), cmd_name)
            assert isinstance(command, click.Command)
            return command
        entries = [entry for entry in self._read_entry_points() if entry.name == cmd_name]
        if entries:
            return load_command(entries)
        if cmd_name in self._installed_by:
            remedy = self._installed_by[cmd_name]
            return UnusableCommand(cmd_name, f"{cmd_name} is not installed here: {remedy}", remedy)
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        listed = self._list_described(ctx)
        limit = formatter.width - 6 - max(len(name) for name, _ in listed)
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(limit)) for name, command in listed]
            )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [
            CompletionItem(name, help=command.get_short_help_str())
            for name, command in self._list_described(ctx)
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def _list_described(self, ctx: click.Context) -> list[tuple[str, click.Command]]:
        """Return the names of commands, and of each a command with its short help."""
        entries = Counter(entry.name for entry in self._read_entry_points())
        listed = []
        for name in self.list_commands(ctx):
            is_ours = name in self._modules or entries[name] == 1
            command: click.Command | None
            if is_ours and name in self._short_helps and name not in self.commands:
                command = click.Command(name, short_help=self._short_helps[name])
            else:
                command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                listed.append((name, command))
        return listed

    def _read_entry_points(self) -> Sequence[EntryPoint]:
        if not self._entry_points:
            return ()
        return tuple(entry_points(group=self._entry_points))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does. The error of a foreign command says what to do instead."""
        try:
            return super().resolve_command(ctx, args)
        except NoSuchCommand as error:
            if meant := self._foreign_commands.get(error.command_name):
                message = f"there is no command {error.command_name}; {meant}"
                raise NameOfAnother(message, ctx) from None
            raise


class UnusableCommand(click.Command):
    """A command that takes any arguments and ends with one line, `problem`."""

    def __init__(self, name: str, problem: str, short_help: str) -> None:
        arguments = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
        super().__init__(
            name,
            params=[arguments],
            callback=self._refuse,
            short_help=short_help,
            add_help_option=False,  # --help is an argument like any other.
            context_settings={"ignore_unknown_options": True},
        )
        self.problem = problem

    def _refuse(self, arguments: tuple[str, ...]) -> NoReturn:  # noqa: ARG002
        refuse(self.problem)


def load_command(entries: Sequence[EntryPoint]) -> click.Command:
    """Return the command of these entry points of one name, or a command that names the faulty
    package."""
    name = entries[0].name
    if len(entries) > 1:
        packages = " and ".join(sorted(map(_package, entries)))
        problem = f"{name} is a command of {packages}; uninstall all but one of these packages"
        return UnusableCommand(name, problem, f"of several packages: {packages}")
    [entry] = entries
    package = _package(entry)
    try:
        command = entry.load()
    except Exception as error:  # noqa: BLE001 - another's code: whatever it raises is named
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        problem = f"{name}: the package {package} cannot be imported ({reason})"
    else:
        if isinstance(command, click.Command):
            return command
        problem = f"{name}: {entry.value} of the package {package} is no click command"
    remedy = "update or uninstall the package"
    return UnusableCommand(name, f"{problem}; {remedy}", f"{package} cannot be used")


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.module
