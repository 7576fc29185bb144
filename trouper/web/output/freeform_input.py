"""A custom tool's input, decoded from the arguments of the function that stands for the tool."""

from __future__ import annotations

import json
import re
from typing import Any

from trouper.web.output.formats.text_source import SPACE
from trouper.web.output.tool_forms import INPUT

HEAD = '{"' + INPUT + '":"'
GAPS = frozenset(("", "{", '{"' + INPUT + '"', '{"' + INPUT + '":'))
UNITS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)
"""Characters and complete escapes of a JSON string."""


class FreeformInput:
    """Decodes `{"input": "..."}` as a stream, other arguments at the end."""

    def __init__(self) -> None:
        self._head = ""
        self._held: list[str] = []
        """An incomplete escape; all arguments if `HEAD` is missing."""
        self._streams: bool | None = None
        """Whether the arguments begin with `HEAD`; None: unknown."""
        self._ended = False

    def push(self, text: str) -> str:
        begin = self._text_begins(text) if self._streams is None else 0
        if not self._streams:
            self._held.append(text)
            return ""
        return "" if self._ended else self._known("".join((*self._held, text[begin:])))

    def _text_begins(self, text: str) -> int:
        for index, char in enumerate(text):
            if char in SPACE and self._head in GAPS:
                continue
            self._head += char
            if not HEAD.startswith(self._head):
                self._streams = False
                break
            if self._head == HEAD:
                self._streams = True
                self._held.clear()
                return index + 1
        return 0

    def _known(self, text: str) -> str:
        units = UNITS.match(text)
        assert units is not None, "the pattern matches nothing, too"
        self._ended = text[units.end() : units.end() + 1] == '"'
        self._held = [text[units.end() :]]
        return _decoded(units[0])

    def end(self) -> str:
        return "" if self._streams else _input_of("".join(self._held))


def _decoded(units: str) -> str:
    text: str = json.loads(f'"{units}"', strict=False)
    return text


def _input_of(arguments: str) -> str:
    try:
        value: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return ""  # The answer was cut, or nested too deeply for Python.
    if isinstance(value, dict):
        inner = value.get(INPUT, next(iter(value.values())) if len(value) == 1 else value)
        value = "" if not value else inner
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
