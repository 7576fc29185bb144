"""The help of commands: groups of flags, no dead ones, and words that say what a command does."""

from __future__ import annotations

import re

import click
from click.testing import CliRunner

from tests.flags_page import options
from trouper import cli
from trouper.cli.flag_groups import GROUPS, OLDER
from trouper.protocol.output_formats import TOOL_PARSERS

OWN_FLAGS_OF_DOCTOR = ["--config", "--json", "--for", "--help"]


def help_of(*command: str) -> str:
    outcome = CliRunner().invoke(cli.main, [*command, "--help"], terminal_width=100)
    assert outcome.exit_code == 0
    return outcome.output


def flags_in(text: str) -> list[str]:
    return re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)


def test_the_flags_of_serve_are_in_groups_by_use() -> None:
    text = help_of("serve")
    titles = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert titles == ["Options", *GROUPS]
    grouped = [options()[name].opts[0] for names in GROUPS.values() for name in names]
    assert flags_in(text) == ["--help", *grouped]
    assert grouped.index("--port") < 20


def test_older_names_are_in_no_help_and_still_taken() -> None:
    for name in OLDER:
        assert options()[name].opts[0] not in help_of("serve")
    arguments = ["--max-batch-size", "3", "--sequence-cache-size", "1", "--print-config"]
    outcome = CliRunner().invoke(cli.main, ["serve", *arguments])
    assert outcome.exit_code == 0
    assert "\nmax-batch-size = 3  # flag\n" in outcome.output


def test_the_help_of_doctor_names_its_own_flags_and_where_the_others_are() -> None:
    text = help_of("doctor")
    assert sorted(flags_in(text)) == sorted(OWN_FLAGS_OF_DOCTOR)
    assert "`trouper serve --help` lists them" in text
    command = cli.main.get_command(click.Context(cli.main), "doctor")
    assert command is not None
    settings = {name for name, option in options().items() if option.envvar}
    taken = {parameter.name for parameter in command.params}
    assert settings - taken == {"log_level", "log_format", "otlp_endpoint"}


def test_the_formats_of_calls_do_not_fill_the_help_and_can_be_listed() -> None:
    assert "--tool-parser FORMAT" in help_of("serve")
    assert "hermes" not in help_of("serve")
    outcome = CliRunner().invoke(cli.main, ["serve", "--tool-parser", "list"])
    assert all(name in outcome.stderr for name in TOOL_PARSERS)
