"""Text of others (a model, a server, a file's name), in which no character commands a terminal."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters: text must not move the cursor, retitle the window or write the clipboard."""
BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Those, ends of lines, and what turns the direction of writing: a name must not look like
another one."""


def text_shown(text: str) -> str:
    """Return a text of several lines with U+FFFD for control characters."""
    return CONTROL.sub("\ufffd", text)


def line_shown(text: str) -> str:
    """Return a name or a message as one line, with U+FFFD for what would end or change it."""
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


SURROGATE = re.compile("[\ud800-\udfff]")
"""Surrogates, as which Python keeps bytes that it could not decode (PEP 383)."""


def text_of(typed: str) -> str:
    """Return the text with U+FFFD for bytes that are no UTF-8, as where a file is decoded with
    replacement."""
    return SURROGATE.sub("\ufffd", typed)


def can_be_sent(value: Any) -> bool:
    """Whether a request can carry the value. JSON has neither NaN nor Infinity, though `json.loads`
    takes both, and 1e999 too; UTF-8 has no lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


NARROWEST_NAME = 16
"""Width down to which names are folded. A terminal that is still too narrow breaks lines."""
UNBOUNDED = 100_000


def print_listing(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column has names, within the width of the terminal as far as
    nothing is lost by that. Elsewhere, as in a pipe, each row is one line."""
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
