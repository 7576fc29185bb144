"""Calls as JSON objects, {"name": ..., "arguments": {...}}: Hermes, Qwen, Llama, Mistral, forced
tools. Arguments stream as soon as the name is known."""

from __future__ import annotations

import json
import re
from functools import cache
from re import Pattern
from typing import Any

import attrs

from trouper.web.output.formats.call_sink import CallSink, NotACall
from trouper.web.output.formats.lenient_json import LenientJson, completed
from trouper.web.output.formats.text_source import END, SPACE, Steps, TextSource

NAME_KEYS = {"name", "function", "tool_name"}
ARGUMENT_KEYS = {"arguments", "parameters", "args"}
OTHER_KEYS = {"id", "type", "index", "tool_call_id"}
LONGEST_NAME = 256


@attrs.frozen
class Ends:
    """End markers of calls: `first` follows the JSON, `rest` may follow; `start` precedes the next
    call."""

    first: str = ""
    rest: tuple[str, ...] = ()
    start: str = ""


NO_END = Ends()


def stream_object(source: TextSource, sink: CallSink, ends: Ends) -> Steps[bool]:
    """Read an object as arguments; True if repaired."""
    value, plain = LenientJson(), _plain_text(ends.first[:1])
    while not value.done:
        if value.in_text and (text := source.take(plain)):
            sink.arguments(text)
        source.keep()
        if source.is_dry:  # Go on with a run again, not with a single character.
            yield
            continue
        position = source.position
        if ends.first and (yield from source.matches(ends.first)):
            if not value.in_string or (yield from _ends_unclosed(source, ends)):
                source.rewind(position)
                break
            sink.arguments("".join(map(value.push, ends.first)))
            continue
        char = yield from source.next()
        if char == END:
            break
        sink.arguments(value.push(char))
    if not source.cut or value.done:
        sink.arguments(value.close())
    return value.repaired


@cache
def _plain_text(marker: str) -> Pattern[str]:
    return re.compile(rf"""[^"'\\\x00-\x1f{re.escape(marker)}]+""")


def _ends_unclosed(source: TextSource, ends: Ends) -> Steps[bool]:
    """Whether a call ends within an unclosed string. Reads nothing."""
    if (yield from source.ends_with((ends.first, *ends.rest))):
        return True
    position = source.position
    yield from source.skip()
    begins = bool(ends.start) and (yield from source.matches(ends.start))
    for expected in '{"':  # In a string the quote would have a backslash.
        yield from source.skip()
        begins = begins and (yield from source.matches(expected))
    source.rewind(position)
    return begins


@attrs.define
class _CallObject:
    name: str | None = None
    arguments: str | None = None
    repaired: bool = False
    depth: int = 1


def read_call(source: TextSource, sink: CallSink, ends: Ends) -> Steps[None]:
    """Raises `NotACall` unless the call has begun."""
    call = _CallObject()
    yield from source.next()
    while call.depth:
        yield from source.skip(SPACE + ",")
        char = yield from source.next()
        if char == "}":
            call.depth -= 1
        elif char in ("'", '"'):
            started = yield from _entry(source, sink, call, ends)
            if started:
                yield from _rest(source, call)
                sink.end(repaired=call.repaired and not source.cut)
                return
        else:
            raise NotACall
    if call.name is None:
        raise NotACall
    sink.add_call(sink.name_of(call.name), call.arguments or "{}", repaired=call.repaired)


def _entry(source: TextSource, sink: CallSink, call: _CallObject, ends: Ends) -> Steps[bool]:
    """Read one member of a call's object; True if the arguments were streamed. A name may hold the
    object of another level. Raises `NotACall` for a member that no call has."""
    source.rewind(source.position - 1)
    key = yield from _short_string(source)
    yield from source.skip()
    if not (yield from source.first_of((":", "="))):
        raise NotACall
    yield from source.skip()
    opening = yield from source.peek()
    if key in NAME_KEYS and opening == "{":
        yield from source.next()
        call.depth += 1
    elif key in NAME_KEYS:
        call.name = sink.name_of((yield from _short_string(source)))
    elif key in ARGUMENT_KEYS and opening == "{" and call.name is not None:
        sink.start(call.name)
        call.repaired = yield from stream_object(source, sink, ends)
        return True
    elif key in ARGUMENT_KEYS:
        call.arguments, repaired = _as_object((yield from _any_value(source)))
        call.repaired = call.repaired or repaired
    elif call.name is not None or key in OTHER_KEYS:
        yield from _any_value(source)
    else:
        raise NotACall
    return False


def _rest(source: TextSource, call: _CallObject) -> Steps[None]:
    while call.depth:
        position = source.position
        yield from source.skip(SPACE + ",")
        char = yield from source.next()
        if char == "}":
            call.depth -= 1
            source.keep()
        elif char in ("'", '"'):
            source.rewind(position)
            yield from source.skip(SPACE + ",")
            yield from _short_value(source)
            yield from source.skip()
            if (yield from source.matches(":")):
                yield from source.skip()
                yield from _short_value(source)
        else:
            source.rewind(position)
            call.repaired = True
            return


def _short_value(source: TextSource) -> Steps[None]:
    try:
        yield from _any_value(source, longest=LONGEST_NAME)
    except NotACall:
        return


def _short_string(source: TextSource) -> Steps[str]:
    quote = yield from source.peek()
    if quote not in ("'", '"'):
        raise NotACall
    text = yield from _any_value(source, longest=LONGEST_NAME)
    value = json.loads(text)
    if not isinstance(value, str):
        raise NotACall
    return value


def _any_value(source: TextSource, longest: int | None = None) -> Steps[str]:
    """Read one value as valid JSON. Raises `NotACall`."""
    value, parts, length = LenientJson(), [], 0
    first = yield from source.peek()
    while True:
        char = yield from source.peek()
        length += 1
        if char == END or (longest is not None and length > longest):
            raise NotACall
        parts.append(value.push(char))
        if value.done:
            break
        yield from source.next()
    if first in "{[\"'":  # A bare word ends before the character that shows the end.
        yield from source.next()
    if not any(parts):
        raise NotACall
    return "".join(parts)


def _decoded(text: str) -> Any:
    """Raises `NotACall` for depth or digits beyond Python's limits."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotACall from None


def _as_object(text: str) -> tuple[str, bool]:
    """Return the JSON of an object, also from a string that holds JSON. Raises `NotACall`."""
    value, repaired = _decoded(text), False
    if isinstance(value, str):
        text, repaired = completed(value)
        value = _decoded(text)
    if value is None:
        return "{}", False
    if not isinstance(value, dict):
        raise NotACall
    return text, repaired


def json_section(source: TextSource, sink: CallSink, ends: Ends) -> Steps[bool]:
    """Returns whether the section's end marker was read."""
    before = sink.calls
    while True:
        opens = "" if ends.first[:1] == "[" and sink.calls > before else "["
        yield from source.skip(f"{SPACE}{opens}],;")
        if ends.first and (yield from source.matches(ends.first)):
            if sink.calls == before:
                raise NotACall
            return True
        char = yield from source.peek()
        if char == "`" and sink.calls == before:
            yield from _fence(source)
        elif char == "{":
            yield from read_call(source, sink, ends)
            source.keep()
        elif char == "}" and sink.calls > before:
            yield from source.next()
        elif sink.calls > before:
            return False
        else:
            raise NotACall


def _fence(source: TextSource) -> Steps[None]:
    if not (yield from source.matches("```")):
        raise NotACall
    yield from source.matches("json")
