"""Text of others (a model, a server, a file's name), in which no character commands a terminal."""

from __future__ import annotations

import re
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
