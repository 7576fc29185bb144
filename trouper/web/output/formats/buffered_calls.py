"""Calls in formats that are parsed from the whole text up to the end marker."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from trouper.web.output.formats.call_sink import CallSink, NotACall
from trouper.web.output.formats.text_source import END, Steps, TextSource

ParseCalls = Callable[[str], Sequence[tuple[str, str]]]
"""Returns names and arguments as JSON. May raise any exception."""


def buffered_section(
    source: TextSource, sink: CallSink, end: str, parse: ParseCalls
) -> Steps[bool]:
    """Read one section; True if the end marker was read. Raises `NotACall`."""
    parts: list[str] = []
    while True:
        if end and (yield from source.matches(end)):
            break
        char = yield from source.next()
        if char == END:
            end = ""
            break
        parts.append(char)
    for name, arguments in _calls("".join(parts), parse):
        sink.add_call(sink.name_of(name), arguments)
    return bool(end)


def _calls(text: str, parse: ParseCalls) -> Sequence[tuple[str, str]]:
    try:
        found = parse(text)
        objects = all(isinstance(json.loads(arguments), dict) for _, arguments in found)
    except Exception as error:
        raise NotACall from error
    if not found or not objects:
        raise NotACall
    return found
