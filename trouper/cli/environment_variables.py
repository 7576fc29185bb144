"""Variables that were meant for Trouper but misspelt: a wrong flag is an error, a wrong variable
would have no effect silently."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

import click

from trouper import workarounds

PREFIX = "TROUPER_"
ALIKE = 0.85
"""Minimum similarity. A less similar variable belongs to other programs: scripts that start a
server have variables, too."""


def misspelt(context: click.Context, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables that no command knows, each with the one that was probably meant."""
    root = context.find_root()
    known = {
        workarounds.VARIABLE,
        *(
            variable
            for command in _commands(root, root.command)
            for variable in _variables(command)
        ),
    }
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, 1, ALIKE)
            if near:
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
