"""A command is imported when it is called."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from trouper import cli
from trouper.cli.lazy_group import LazyGroup


def test_each_command_is_there_under_its_name() -> None:
    files = (Path(cli.__file__).parent / "commands").iterdir()
    modules = {path.stem for path in files if path.stem[0] != "_"}
    context = click.Context(cli.main)
    assert sorted(cli.COMMANDS) == sorted(modules)
    names = [*cli.COMMANDS, *cli.LAB_COMMANDS]
    assert cli.main.list_commands(context) == sorted(names)
    for name in names:
        command = cli.main.get_command(context, name)
        assert command is not None and command.name == name
    assert cli.main.get_command(context, "commands") is None


def modules_after(*arguments: str) -> list[str]:
    """The names of the modules that a command has imported when it ends."""
    program = """
import atexit, sys
from trouper.cli import main
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
main(sys.argv[1:], standalone_mode=False)
"""
    command = [sys.executable, "-c", program, *arguments]
    # A variable that no setting has is compared to those of all commands.
    others = {name: os.environ[name] for name in os.environ if not name.startswith("TROUPER_")}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=others)
    return ended.stderr.split("\n")[-2].split()


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        (["--version"], []),
        (["--help"], []),
        (["completion", "--help"], ["completion"]),
        (["serv"], []),
        (["models", "--help"], ["models"]),
        (["serve", "--print-config"], ["serve"]),
    ],
)
def test_others_are_not_imported(arguments: list[str], imported: list[str]) -> None:
    modules = modules_after(*arguments)
    prefix = "trouper.cli.commands."
    names = [name.removeprefix(prefix) for name in modules if name.startswith(prefix)]
    assert names == imported
    assert "httpx2" not in modules and "trouper_lab" not in modules


def test_a_list_of_commands_has_a_line_of_each() -> None:
    shown = CliRunner().invoke(cli.main, ["--help"]).output
    completed = cli.main.shell_complete(click.Context(cli.main), "")
    for name, line in (cli.COMMANDS | cli.LAB_COMMANDS).items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", shown, re.MULTILINE)
        assert (name, line) in [(each.value, each.help) for each in completed]


def test_a_list_of_no_models_imports_no_library_of_models(tmp_path: Path) -> None:
    modules = modules_after("models", "ls", "--models-from", str(tmp_path))
    assert "trouper.cli.model_verdicts" in modules
    assert "mlx_lm" not in modules and "transformers" not in modules


def test_an_error_for_a_misspelt_command_names_those_that_are_alike() -> None:
    outcome = CliRunner().invoke(cli.main, ["serv"])
    assert outcome.exit_code == 2
    assert "did you mean serve?" in outcome.output


def test_a_program_may_add_and_take_commands() -> None:
    """As of every group of click's."""
    group = LazyGroup("own", lazy_commands={"completion": "trouper.cli.commands.completion"})
    group.add_command(click.Command("other"))
    context = click.Context(group)
    assert group.list_commands(context) == ["completion", "other"]
    assert group.get_command(context, "other") is group.commands["other"]
    group.add_command(click.Command("completion", help="ours"))
    command = group.get_command(context, "completion")
    assert command is not None and command.help == "ours"
