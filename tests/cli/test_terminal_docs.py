"""docs/terminal.md says what the commands do."""

from __future__ import annotations

from pathlib import Path

import click

from trouper.cli import main
from trouper.cli.conversation import COMMANDS
from trouper.cli.doctor_checks import CHECKS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "terminal.md").read_text()


def rows(command: str) -> dict[str, str]:
    section = PAGE.split(f"\n## {command}\n")[1].split("\n## ")[0]
    lines = [
        line.strip("| ").split(" | ", 1) for line in section.splitlines() if line.startswith("|")
    ]
    return {name.strip("`"): said for name, said in lines[2:]}


def test_what_chat_follows() -> None:
    assert rows("trouper chat") == {name: command.__doc__ for name, command in COMMANDS.items()}


def test_what_the_doctor_looks_at() -> None:
    assert list(rows("trouper doctor")) == list(CHECKS)


def test_every_command_of_a_person_is_there() -> None:
    for name in ("chat", "top", "bench", "doctor"):
        assert name in main.list_commands(click.Context(main)) and f"\n## trouper {name}\n" in PAGE
