"""Flags that messages and docstrings of the package name: a user will try them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import trouper
from trouper import cli

PACKAGE = Path(trouper.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])")
FOREIGN = PACKAGE / "cli" / "foreign_flags.py"
"""Flags of other servers, each of which tests/cli/test_foreign_flags.py looks at."""
EXAMPLE = "--flag"
UV = {"--all-packages", "--extra", "--force", "--frozen", "--inexact", "--python"}
PIP = {
    "--dest",
    "--disable-pip-version-check",
    "--no-deps",
    "--no-input",
    "--only-binary",
    "--progress-bar",
}
AGENTS = {"--auth-type", "--override-with-envs", "--provider", "--settings"}
ARROW = "--admitted"
"""Of the graph of actors: `--admitted (news)-->`."""
OTHERS = {ARROW, EXAMPLE, *UV, *PIP, *AGENTS}


def flags_of(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            # Commands of packages that are not installed are None.
            if (child := command.get_command(context, name)) is not None:
                yield from flags_of(child)


def named_flags(source: str) -> Iterator[tuple[int, str]]:
    """Lines and flags of the strings of a module, docstrings too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, flag) for flag in FLAG.findall(node.value))


def unknown_flags(source: str, ours: set[str]) -> list[tuple[int, str]]:
    if ours.issuperset(FLAG.findall(source)):
        return []  # Most modules need not be parsed.
    return [(line, flag) for line, flag in named_flags(source) if flag not in ours]


@pytest.fixture(scope="module")
def ours() -> set[str]:
    return {"--help", *flags_of(cli.main)}


def test_a_flag_that_does_not_exist_is_seen(ours: set[str]) -> None:
    source = 'f"{rows} rows (--rows, --prefill-batch-size)"\n"a --requests--> b"'
    assert unknown_flags(source, ours) == [(1, "--rows")]


def test_every_flag_that_the_package_names_exists(ours: set[str]) -> None:
    sources = {path: path.read_text("utf-8") for path in PACKAGE.rglob("*.py") if path != FOREIGN}
    unknown = {
        str(path.relative_to(PACKAGE)): flags
        for path, source in sources.items()
        if (flags := unknown_flags(source, ours | OTHERS))
    }
    assert not unknown
    named = {flag for source in sources.values() for flag in FLAG.findall(source)}
    assert named >= OTHERS, "no longer named, so no longer an exception"
