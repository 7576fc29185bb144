"""`python -m tests.coming_from_page` writes the tables of docs/coming-from.md from
`trouper/cli/foreign_flags.py`. What stands before each table is written by hand."""

from __future__ import annotations

import re
from pathlib import Path

from trouper.cli.foreign_flags import FOREIGN_FLAGS, SERVERS

PAGE = Path(__file__).parent.parent / "docs" / "coming-from.md"
HEADS = {"ollama": "variable"}


def table_of(server: str) -> str:
    """One row for each thing that the server has flags of."""
    head = f"| {server}'s {HEADS.get(server, 'flag')} | here |\n|---|---|\n"
    rows = [row for row in FOREIGN_FLAGS if server in row.names]
    return head + "".join(
        f"| {', '.join(f'`{name}`' for name in row.names[server].split())} | {row.meaning('`')} |\n"
        for row in rows
    )


def rendered(page: str) -> str:
    for server in SERVERS:
        head = rf"^\| {re.escape(server)}'s [^\n]*\n"
        tables = [*re.finditer(rf"{head}(?:\|[^\n]*\n)*", page, re.MULTILINE)]
        assert len(tables) == 1, f"docs/coming-from.md has {len(tables)} tables of {server}"
        [table] = tables
        page = page[: table.start()] + table_of(server) + page[table.end() :]
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
