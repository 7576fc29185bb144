"""Text of others for a terminal, typed text for a request, and tables."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

# Characters that move the cursor, retitle the window or write the clipboard.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# Also ends of lines, and turns of the direction of writing
BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def text_shown(text: str) -> str:
    """Keeps ends of lines."""
    return CONTROL.sub("\ufffd", text)


def line_shown(text: str) -> str:
    return BREAKS.sub("\ufffd", text)


def data_shown(data: Any) -> Any:
    """Return parsed JSON in which each text and each key is one line."""
    match data:
        case str():
            return line_shown(data)
        case list():
            return [data_shown(item) for item in data]
        case dict():
            return {line_shown(key): data_shown(value) for key, value in data.items()}
        case _:
            return data


SURROGATE = re.compile("[\ud800-\udfff]")  # Python's form of bytes that are no UTF-8 (PEP 383)


def text_of(typed: str) -> str:
    return SURROGATE.sub("\ufffd", typed)


def can_be_sent(value: Any) -> bool:
    """Whether JSON in UTF-8 can carry the value, as NaN and surrogates cannot be."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


NARROWEST_NAME = 16  # Width down to which names are folded
UNBOUNDED = 100_000


def print_listing(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table without cut cells: a terminal gets folded names, a pipe a line for each row."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

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
