"""What the README and the pages of the documentation show to be typed, and what is said about
running it.

A comment right above a block says how it is treated:

    <!-- run: as the server of all pages -->    it is started once and asked by every block that
    names its address
    <!-- run: as the server of this page -->    the same for a tutorial (tests/test_tutorials.py)
    <!-- not run: REASON -->                    for what needs a Mac, a GPU, root, a hub
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "packaging" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
COMMANDS = frozenset({"sh", "python"})
DATA = frozenset({"toml", "json", "yaml", "nginx", "js"})
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"<!-- (?P<how>run|not run): (?P<said>[^\n]+) -->\n *$")
THE_SERVER = "as the server of all pages"
THE_PAGES_SERVER = "as the server of this page"


@attrs.frozen
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str
    run: str | None = None
    not_run: str | None = None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_command(self) -> bool:
        return self.language in COMMANDS


def blocks_of(page: Path) -> Iterator[Block]:
    content = page.read_text("utf-8")
    for found in FENCE.finditer(content):
        before = content[: found.start()]
        mark = MARK.search(before)
        said = {mark["how"]: mark["said"]} if mark else {}
        line = before.count("\n") + 1
        yield Block(
            page, line, found["language"], found["text"], said.get("run"), said.get("not run")
        )


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]
