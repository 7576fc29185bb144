"""Calls in formats that are parsed from the whole text of a call or section."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from trouper.web.output.formats.call_sink import CallSink, NotACall
from trouper.web.output.formats.json_calls import LONGEST_NAME
from trouper.web.output.formats.text_source import END, SPACE, Steps, TextSource

ParseCalls = Callable[[str], Sequence[tuple[str, str]]]
"""Returns names and arguments as JSON. May raise any exception."""
NO_NAME = re.compile(r"[^\w.-]")
SIGNS = re.compile(r"""[()\[\]{}<\\'"]""")


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


def python_section(
    source: TextSource, sink: CallSink, ends: tuple[str, ...], parse: ParseCalls
) -> Steps[bool]:
    """Read calls `NAME(KEY=VALUE)` of a list or of lines, each as soon as it is complete. True if
    an end marker was read. Raises `NotACall`."""
    before = sink.calls
    while True:
        yield from source.skip(SPACE + "[],;")
        if sink.calls > before and (yield from source.first_of(ends)):
            return True
        name = yield from source.until("(", LONGEST_NAME, NO_NAME)
        if not name:
            if sink.calls > before:
                return False
            raise NotACall
        called = sink.name_of(name)
        values = yield from _parenthesis(source, ends)
        (_, arguments), *others = _calls(f"[{name}({values})]", parse)
        if others:
            raise NotACall
        sink.add_call(called, arguments)
        source.keep()


def _parenthesis(source: TextSource, ends: tuple[str, ...]) -> Steps[str]:
    """Read up to the parenthesis that closes, or to an end marker."""
    pieces, depth, quote = list[str](), 1, ""
    while True:
        pieces.append(source.run(SIGNS))
        if source.is_dry:
            yield
            continue
        position = source.position
        ended = yield from source.first_of(ends)
        source.rewind(position)
        sign = "" if ended else (yield from source.next())
        if sign == END:
            return "".join(pieces)
        if sign == "\\":
            sign += yield from source.next()
        elif sign in ("'", '"'):
            quote = "" if quote == sign else quote or sign
        elif not quote:
            depth += (sign in "([{") - (sign in ")]}")
        if not depth:
            return "".join(pieces)
        pieces.append(sign)


def _calls(text: str, parse: ParseCalls) -> Sequence[tuple[str, str]]:
    try:
        found = parse(text)
        objects = all(isinstance(json.loads(arguments), dict) for _, arguments in found)
    except Exception as error:
        raise NotACall from error
    if not found or not objects:
        raise NotACall
    return found
