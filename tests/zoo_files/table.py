"""The table of families in docs/models.md, made of what was played."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.zoo.catalogue import CONFIGS
from tests.zoo_files.checking import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: just zoo-files -->\n", "<!-- end of families -->"
HEAD = "| family | architecture | calls | reasoning | context | notes |"
WORDS = {
    "system messages": "S",
    "later system": "",
    "earlier calls": "T",
    "tool results": "",
    "an empty user message precedes": "U",
}
"""Letters for what a template's adaptation says, by its begin; the page explains them."""


def row(outcome: Outcome) -> str:
    cells = (
        outcome.family.name,
        f"`{_architecture(outcome)}`",
        _or_nothing(outcome.tool_parser),
        _reasoning(outcome.reasoning_parser, outcome.default),
        f"{outcome.context:,}",
        _notes(outcome),
    )
    return f"| {' | '.join(cells)} |"


def in_short(outcome: Outcome) -> str:
    """A family that has neither calls nor reasoning."""
    said = [f"`{_architecture(outcome)}`", f"{outcome.context:,}", _notes(outcome)]
    return f"{outcome.family.name} ({'; '.join(filter(None, said))})"


def _architecture(outcome: Outcome) -> str:
    return outcome.family.kind or str(CONFIGS[outcome.family.config]["model_type"])


def _notes(outcome: Outcome) -> str:
    return ", ".join(dict.fromkeys(filter(None, map(_short, outcome.missing))))


def _or_nothing(parser: str) -> str:
    return "" if parser == "none" else parser


def _reasoning(parser: str, default: str) -> str:
    """The format, and when it thinks."""
    return f"{parser}, {default}" if _or_nothing(parser) else ""


def _short(text: str) -> str:
    return next((short for begin, short in WORDS.items() if text.startswith(begin)), text)


def states(page: str, outcome: Outcome) -> bool:
    """Whether the page has the family's row, or its words among those that have no row."""
    return row(outcome) in page.splitlines() or f" {in_short(outcome)}" in page


def table(outcomes: Iterable[Outcome]) -> str:
    rows, others = [], []
    for outcome in outcomes:
        if _or_nothing(outcome.tool_parser) or _or_nothing(outcome.reasoning_parser):
            rows.append(row(outcome))
        else:
            others.append(in_short(outcome))
    head = [HEAD, "|" + "---|" * 6, *rows]
    return "\n".join(head) + f"\n\nNeither calls nor reasoning: {', '.join(others)}."


def write(outcomes: Iterable[Outcome]) -> None:
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(outcomes)}\n\n{END}{behind}", encoding="utf-8")
