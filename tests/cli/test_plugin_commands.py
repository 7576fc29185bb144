"""Commands of installed packages: real entry points, of real metadata on the path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from trouper import cli
from trouper.cli import lazy_group
from trouper.cli.exits import USAGE_ERROR

HELLO = """
import click

@click.command(short_help="Greet.")
@click.option("--name", default="you")
def hello(name):
    click.echo(f"hello {name}")
"""
Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package with one command: a module, and the metadata that a wheel leaves."""

    def install_command(package: str, command: str, source: str) -> None:
        site, module = tmp_path / package, f"{package}_module"
        metadata = site / f"{package}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        (metadata / "entry_points.txt").write_text(
            f"[trouper.commands]\n{command} = {module}:hello\n"
        )
        (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install_command


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


def test_a_package_adds_a_command(install: Install) -> None:
    install("greeting", "hello", HELLO)
    assert call("hello", "--name", "Ada").output == "hello Ada\n"
    listed = next(line for line in call("--help").output.splitlines() if "hello" in line)
    assert listed.split() == ["hello", "Greet."]
    assert "did you mean hello?" in call("helo").output, "a misspelt name is compared to it, too"


@pytest.mark.parametrize("arguments", [(), ("--name", "Ada"), ("--help",), ("word",)])
def test_a_package_that_cannot_be_imported_is_named(
    install: Install, arguments: tuple[str, ...]
) -> None:
    install("greeting", "hello", "import nothing_of_this_name")
    result = call("hello", *arguments)
    assert result.exit_code == USAGE_ERROR
    assert result.output == (
        "trouper: hello: the package greeting cannot be imported (ModuleNotFoundError: No module "
        "named 'nothing_of_this_name'); update or uninstall the package\n"
    )


def test_a_package_that_cannot_be_imported_harms_no_other_command(install: Install) -> None:
    install("greeting", "hello", "raise RuntimeError('in two\\nlines')")
    assert call("completion", "bash").exit_code == 0
    lines = call("--help").output.splitlines()
    assert any(line.split() == ["hello", "greeting", "cannot", "be", "used"] for line in lines)
    assert any(line.split()[:1] == ["serve"] for line in lines)
    assert len(call("hello").output.splitlines()) == 1


def test_an_entry_point_must_be_a_click_command(install: Install) -> None:
    install("greeting", "hello", "def hello(): pass")
    result = call("hello")
    assert result.exit_code == USAGE_ERROR
    assert "greeting_module:hello of the package greeting is no click command" in result.output


def test_a_built_in_command_cannot_be_replaced(install: Install) -> None:
    install("greeting", "completion", HELLO)
    assert "Print a script" in call("completion", "--help").output


def test_a_name_of_two_packages_is_refused(install: Install) -> None:
    for package in ("greeting", "welcome"):
        install(package, "hello", HELLO)
    result = call("hello")
    assert result.exit_code == USAGE_ERROR
    assert "hello is a command of greeting and welcome; uninstall" in result.output


@pytest.mark.parametrize("name", cli.LAB_COMMANDS)
def test_without_the_laboratory_its_commands_say_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_group, "entry_points", lambda **_: ())
    result = call(name, "--quick")
    assert result.exit_code == USAGE_ERROR
    assert result.output == (f"trouper: {name} is not installed here: {cli.LAB_REMEDY}\n")
    assert "it is in the package trouper-lab" in call("--help").output


def test_the_laboratory_is_found_by_its_entry_points() -> None:
    context = click.Context(cli.main)
    for name in cli.LAB_COMMANDS:
        command = cli.main.get_command(context, name)
        assert command is not None and command.callback is not None
        assert command.callback.__module__.startswith("trouper_lab.")
