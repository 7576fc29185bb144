"""The table of families in docs/models.md, made of what was played."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.zoo.catalogue import CONFIGS
from tests.zoo_files.checking import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: just zoo-files -->\n", "<!-- end of families -->"
HEAD = "| family | architecture | calls of tools | reasoning | thinks | context | what is missing |"
WORDS = {
    "system messages": "system messages become the user's",
    "later system": "",
    "earlier calls": "calls of earlier turns become text",
    "tool results": "",
}
"""Short forms of what a template's adaptation says, by its begin."""


def row(outcome: Outcome) -> str:
    family = outcome.family
    config = CONFIGS[family.config]
    cells = (
        family.name,
        f"`{family.kind or config['model_type']}`",
        outcome.tool_parser,
        outcome.reasoning_parser,
        outcome.default,
        f"{outcome.context:,}",
        "; ".join(dict.fromkeys(filter(None, map(_short, outcome.missing)))),
    )
    return f"| {' | '.join(cells)} |"


def _short(text: str) -> str:
    return next((short for begin, short in WORDS.items() if text.startswith(begin)), text)


def table(outcomes: Iterable[Outcome]) -> str:
    return "\n".join([HEAD, "|" + "---|" * 7, *map(row, outcomes)])


def write(outcomes: Iterable[Outcome]) -> None:
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(outcomes)}\n\n{END}{behind}", encoding="utf-8")
