"""The commands by name, each imported when it is run or described."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from importlib import import_module

import click


class CommandModules(MutableMapping[str, click.Command]):
    """Commands of a group, as click wants them: `NAME` is the attribute NAME of `trouper.cli.commands.NAME`. All of them together take a third of
    a second to import, of which one needs a tenth, or two if it is a server's or one's of its clients."""

    def __init__(self, names: Sequence[str]) -> None:
        self._found: dict[str, click.Command | None] = dict.fromkeys(names)

    def __getitem__(self, name: str) -> click.Command:
        command = self._found[name]
        if command is None:
            command = self._found[name] = getattr(import_module(f"trouper.cli.commands.{name}"), name)
        return command

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._found[name] = command

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
