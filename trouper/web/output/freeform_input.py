"""The input of a custom tool, decoded out of the arguments of the function that stands for it while they are generated."""

from __future__ import annotations

import json
import re
from typing import Any

from trouper.web.output.tool_forms import INPUT

HEAD = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
UNITS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*'
)
"""Characters and complete escapes of a JSON string."""


class FreeformInput:
    """Decodes `{"input": "..."}`. Arguments of any other shape are given at their end: the string that they hold, or
    their JSON."""

    def __init__(self) -> None:
        self._held = ""
        self._streams = False

    def push(self, text: str) -> str:
        """Feed more of the arguments. Returns the text that is now known."""
        self._held += text
        if not self._streams:
            found = HEAD.match(self._held)
            if found is None:
                return ""
            self._streams, self._held = True, self._held[found.end() :]
        known = UNITS.match(self._held)
        assert known is not None, "the pattern matches nothing, too"
        self._held = self._held[known.end() :]
        return _decoded(known[0])

    def end(self) -> str:
        """Return the rest, once the arguments are complete."""
        return "" if self._streams else _input_of(self._held)


def _decoded(units: str) -> str:
    text: str = json.loads(f'"{units}"', strict=False)
    return text


def _input_of(arguments: str) -> str:
    try:
        value: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return ""  # The answer was cut, or it is nested deeper than Python reads.
    if isinstance(value, dict):
        inner = value.get(INPUT, next(iter(value.values())) if len(value) == 1 else value)
        value = "" if not value else inner
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
