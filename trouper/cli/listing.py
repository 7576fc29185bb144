"""Tables of `trouper models ls` and `trouper cache ls`: no name and no number in them is cut,
however narrow the terminal is."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from trouper.cli.terminal_text import line_shown

NARROWEST_NAME = 16
"""Width down to which names are folded. A terminal that is still too narrow breaks lines."""
UNBOUNDED = 100_000


def print_listing(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column has names, within the width of the terminal as far as
    nothing is lost by that. Elsewhere, as in a pipe, each row is one line."""
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column(columns[0], overflow="fold")
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(line_shown(cell)) for cell in row))
    console = Console()
    natural_width = Measurement.get(console, console.options.update_width(UNBOUNDED), table).maximum
    folded = natural_width - max(0, max(len(row[0]) for row in rows) - NARROWEST_NAME)
    Console(width=max(console.width, folded) if sys.stdout.isatty() else natural_width).print(table)
