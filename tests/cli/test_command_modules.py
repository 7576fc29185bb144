"""A command is imported when it is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from trouper import cli
from trouper.cli.command_modules import CommandModules


def test_each_command_is_there_under_its_name() -> None:
    modules = {path.stem for path in (Path(cli.__file__).parent / "commands").iterdir() if path.stem[0] != "_"}
    assert set(cli.main.commands) == set(cli.COMMANDS) == modules
    assert [command.name for command in cli.main.commands.values()] == list(cli.COMMANDS)
    with pytest.raises(KeyError):
        _ = cli.main.commands["commands"]


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        (["--version"], []),
        (["completion", "--help"], ["completion"]),
        (["serv"], []),
        (["models", "--help"], ["models"]),
    ],
)
def test_others_are_not_imported(arguments: list[str], imported: list[str]) -> None:
    program = """
import atexit, sys
from trouper.cli import main
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
main(sys.argv[1:], standalone_mode=False)
"""
    ended = subprocess.run([sys.executable, "-c", program, *arguments], check=False, capture_output=True, text=True)
    modules = ended.stderr.split("\n")[-2].split()
    prefix = "trouper.cli.commands."
    assert [name.removeprefix(prefix) for name in modules if name.startswith(prefix)] == imported
    assert "httpx2" not in modules


def test_a_program_may_add_and_take_commands() -> None:
    """As of every group of click's."""
    group = click.Group("own", commands=CommandModules(["completion"]))
    group.add_command(click.Command("other"))
    assert sorted(group.commands) == ["completion", "other"]
    assert group.commands["other"].name == "other"
    del group.commands["completion"]
    assert list(group.commands) == ["other"] and len(group.commands) == 1
