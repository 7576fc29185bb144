"""docs/agents.md, made by `trouper connect` itself: `python -m tests.agents_page` writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.agents.images import ImageRow, rows
from trouper.cli.agents.agent import (
    Agent,
    ServedModel,
    Setup,
    first_prompts,
    instructions,
)
from trouper.cli.agents.config_files import short
from trouper.cli.commands.connect import AGENTS
from trouper.protocol.suggested_models import AGENT_TOKENS

PAGE = Path(__file__).parent.parent / "docs" / "agents.md"
BEGIN = "<!-- What follows is written by `python -m tests.agents_page`. -->\n"
SERVED = ServedModel(
    "http://127.0.0.1:8000", "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", 262144
)
HOME = Path("/home/you")
MAX_LINES = 45
"""A screen."""
IN_FULL = frozenset({"claude", "codex", "generic"})
"""Clients whose section has all that is printed; the others' say which files, and what to know."""


@contextmanager
def home_of_the_page() -> Iterator[None]:
    """A home with defaults only, from which a person works in `project`."""
    before = dict(os.environ)
    for name in (
        "XDG_CONFIG_HOME",
        "XDG_CACHE_HOME",
        "CLAUDE_CONFIG_DIR",
        "CODEX_HOME",
        "QWEN_HOME",
        "CLINE_DATA_DIR",
    ):
        os.environ.pop(name, None)
    for name in ("PI_CODING_AGENT_DIR", "CONTINUE_GLOBAL_DIR", "OPENCLAW_STATE_DIR", "VIBE_HOME"):
        os.environ.pop(name, None)
    os.environ["HOME"] = str(HOME)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


TABLE = f"""\
## First prompts

Tokens of an agent's first request, by `just agents`, with the family of models that has the most;
those of Claude Code, Codex and opencode in a terminal, where they are longest.
An agent needs a context of {AGENT_TOKENS:,} tokens, which holds twice the longest of these.

| client | version | first prompt |
|---|---|---|
"""


def first_prompts_table() -> str:
    rows = (
        f"| {AGENTS[name].title} | {first.version} | {first.tokens:,} |\n"
        for name, first in first_prompts().items()
    )
    return TABLE + "".join(rows)


PICTURES = """\
## Pictures

`just agents-images` lets each client look at a PNG file: by its tool for reading files, and in its
first prompt. A cell says how the picture was in the request. "No picture": the client sent a text
instead, or has no such way in the terminal.

In a first prompt a picture is named by `@picture.png` (Claude Code, Qwen Code, pi), `--image`
(Codex), `--file` (opencode, Kilo Code), `--attachment` (Copilot CLI) or its name alone (aider).

| client | version | tool | the tool's result | first prompt |
|---|---|---|---|---|
"""


def pictures_table() -> str:
    return PICTURES + "".join(
        f"| {AGENTS[name].title} | {row.version} | {_cells(row)} |\n"
        for name, row in rows().items()
    )


def _cells(row: ImageRow) -> str:
    tool, by_tool = (f"`{row.tool}`", row.by_tool or "no picture") if row.tool else ("", "")
    return " | ".join((tool, by_tool, row.in_prompt or "no picture"))


def sections() -> Iterator[str]:
    """The tables, and one section for each client: the command, and what it prints."""
    yield first_prompts_table()
    yield pictures_table()
    for agent in AGENTS.values():
        setup = agent.setup(SERVED)
        text = instructions(agent, SERVED, setup).replace(f"{Path.cwd()}/", "")
        assert text.count("\n") <= MAX_LINES, agent.name
        if agent.name in IN_FULL:
            yield f"## {agent.title}\n\n`trouper connect {agent.name}` prints:\n\n```\n{text}```\n"
        else:
            yield f"## {agent.title}\n\n{in_short(agent, setup)}\n"


def in_short(agent: Agent, setup: Setup) -> str:
    """Say which command sets a client up, what it changes, and what cannot be."""
    paths = [short(file.path).replace(f"{Path.cwd()}/", "") for file in setup.files]
    names = [] if setup.files else list(setup.variables)
    written = ", ".join(f"`{name}`" for name in [*paths, *names, *setup.exports])
    lines = [f"`trouper connect {agent.name}` sets {written}.", *setup.notes]
    lines += [f"No `--write`: {agent.why_no_write}."] if agent.why_no_write else []
    lines += [f"No `--run`: {agent.why_no_run}."] if agent.why_no_run else []
    return " ".join(lines)


def rendered(page: str) -> str:
    """Return the page with new sections behind what a person wrote."""
    written, begin, _ = page.partition(BEGIN)
    assert begin, "the page lacks the line behind which the sections stand"
    with home_of_the_page():
        return written + begin + "\n" + "\n".join(sections())


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
