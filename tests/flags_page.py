"""`python -m tests.flags_page` writes the tables of docs/flags.md, in the groups of
`trouper serve --help`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import click

from trouper.cli.commands.serve import serve
from trouper.cli.flag_groups import GROUPS, OLDER, OLDER_TITLE
from trouper.cli.model_tables import OF_THE_PROCESS
from trouper.protocol.settings import Settings

PAGE = Path(__file__).parent.parent / "docs" / "flags.md"
TITLE = "\n## All flags\n"
HEAD = "| flag | default | what it is |\n|---|---|---|\n"


def options() -> dict[str, click.Option]:
    """The flags of `serve` by the names of their parameters."""
    return {str(each.name): each for each in serve.params if isinstance(each, click.Option)}


def rendered(page: str) -> str:
    groups = {**GROUPS, OLDER_TITLE: OLDER}
    tables = [
        f"\n### {title}\n\n{HEAD}{''.join(map(_row, names))}" for title, names in groups.items()
    ]
    return page.split(TITLE, maxsplit=1)[0] + TITLE + "\n" + _of_models() + "".join(tables)


def _row(name: str) -> str:
    option = options()[name]
    default = option.to_info_dict()["default"]
    return f"| `{option.opts[0]}` | {_default(default)} | {option.help} |\n"


def _default(value: object) -> str:
    match value:
        case None | () | []:
            return ""
        case False:
            return "off"
        case float():
            return f"`{value:g}`"
        case _:
            return f"`{value}`"


def _of_models() -> str:
    """Which flags are settings of one model, as keys of its table."""
    fields = {field.name for field in attrs.fields(Settings)} - OF_THE_PROCESS
    others = [_flags(names, fields) for names in GROUPS.values()]
    listed = ", ".join(flag for flags in others for flag in flags)
    return f"These stand in no table of a model, for they are the server's: {listed}.\n"


def _flags(names: tuple[str, ...], fields: set[str]) -> Iterator[str]:
    yield from (f"`{options()[name].opts[0]}`" for name in names if name not in fields)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
