"""docs/agents.md is what `trouper connect` prints, and its flags are those of the command."""

from __future__ import annotations

import re

from tests.agents_page import PAGE, rendered
from trouper.cli.commands.connect import AGENTS, connect


def test_the_page_is_what_the_command_prints() -> None:
    page = PAGE.read_text()
    assert page == rendered(page), "run `python -m tests.agents_page`"


def test_every_client_has_its_section() -> None:
    page = PAGE.read_text()
    assert re.findall(r"^## (.*)$", page.split("<!-- What follows")[1], re.MULTILINE) == [
        "First prompts",
        "Pictures",
        *(agent.title for agent in AGENTS.values()),
    ]


def test_flags_of_the_page_are_flags() -> None:
    written = PAGE.read_text().split("<!-- What follows")[0]
    flags = {flag for option in connect.params for flag in option.opts} | {
        "--model",
        "--model-alias",
        "--served-model-name",
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", written))
    assert named <= flags
    assert {"--write", "--dry-run", "--run", "--name"} <= named
