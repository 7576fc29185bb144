"""docs/agents.md, made by `trouper connect` itself: `python -m tests.agents_page` writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.agents.images import ImageRow, rows
from trouper.cli.agents.agent import ServedModel, first_prompts, instructions
from trouper.cli.commands.connect import AGENTS

PAGE = Path(__file__).parent.parent / "docs" / "agents.md"
BEGIN = "<!-- What follows is written by `python -m tests.agents_page`. -->\n"
SERVED = ServedModel(
    "http://127.0.0.1:8000", "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", 262144
)
HOME = Path("/home/you")
MAX_LINES = 45
"""A screen."""


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


TABLE = """\
## First prompts

An agent's first request has its instructions and its tools. `just agents` measured its length in
tokens; the family of models that has the most counts. Answers and files need half as much again.

| client | version | measured | families | first prompt | context, at least |
|---|---|---|---|---|---|
"""


def first_prompts_table() -> str:
    rows = (
        f"| {AGENTS[name].title} | {first.version} | {first.date} | {first.families} "
        f"| {first.tokens:,} | {first.needed:,} |\n"
        for name, first in first_prompts().items()
    )
    return TABLE + "".join(rows)


PICTURES = """\
## Pictures

`just agents-images` lets each client look at a PNG file: by its tool for reading files, which a
scripted model calls, and in its first prompt. A cell says how the picture was in the request; the
engine got the pixels of that file each time. "No picture": the client sent a text instead, or has
no such way without its terminal's page. "Right": answers of the model of `examples/shapes` to the
picture in the first prompt, where that was tried. That model calls no tools.

| client | version | run | tool | the tool's result | first prompt | right |
|---|---|---|---|---|---|---|
"""


def pictures_table() -> str:
    return PICTURES + "".join(
        f"| {AGENTS[name].title} | {row.version} | {row.date} | {_cells(row)} |\n"
        for name, row in rows().items()
    )


def _cells(row: ImageRow) -> str:
    tool, by_tool = (f"`{row.tool}`", row.by_tool or "no picture") if row.tool else ("", "")
    right = f"{row.right} of {row.answers}" if row.answers else ""
    return " | ".join((tool, by_tool, row.in_prompt or "no picture", right))


def sections() -> Iterator[str]:
    """The tables, and one section for each client: the command, and what it prints."""
    yield first_prompts_table()
    yield pictures_table()
    for agent in AGENTS.values():
        text = instructions(agent, SERVED, agent.setup(SERVED)).replace(f"{Path.cwd()}/", "")
        assert text.count("\n") <= MAX_LINES, agent.name
        yield f"## {agent.title}\n\n`trouper connect {agent.name}` prints:\n\n```\n{text}```\n"


def rendered(page: str) -> str:
    """Return the page with new sections behind what a person wrote."""
    written, begin, _ = page.partition(BEGIN)
    assert begin, "the page lacks the line behind which the sections stand"
    with home_of_the_page():
        return written + begin + "\n" + "\n".join(sections())


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
