"""Calls as tags around names and values: Qwen3-Coder and Qwen3.5, GLM, MiniMax, DeepSeek V3.2.

A value has no quotes; the tool's schema decides between text and JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import attrs

from trouper.web.output.formats.call_sink import CallSink, NotACall
from trouper.web.output.formats.json_calls import LONGEST_NAME, Ends, stream_object
from trouper.web.output.formats.parameter_types import ANY, TEXT, SchemaTypes, converted
from trouper.web.output.formats.text_source import END, Steps, TextSource

NAME = re.compile(r"\s*+[\"']?+([^\"'<>\s]++)(?:$|[\"'\s])")
STOPS = re.compile(r"[\n<]")
Others = Callable[[str], bool]
"""Whether a parameter of this name may yet come."""
as_json = json.JSONEncoder(ensure_ascii=False).encode


@attrs.frozen(kw_only=True)
class TagLayout:
    """The tags of a format. `call` and `key` surround a name."""

    call: tuple[str, str]
    """("", "") where the first line names the only call."""
    call_end: str = ""
    key: tuple[str, str]
    type: tuple[str, str] = ("", "")
    """Tags around a value's type, which may stand behind the name."""
    value_start: str = ""
    value_end: str
    section_start: str
    section_end: str
    lines: bool = False
    around: tuple[str, ...] = ()
    """Texts before and behind each call."""

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.call_end, self.section_end, *self.around)))


def tagged_section(source: TextSource, sink: CallSink, layout: TagLayout) -> Steps[bool]:
    """Returns whether the section's end marker was read. Raises `NotACall`."""
    before = sink.calls
    while True:
        yield from _skip(source, layout)
        if sink.calls > before and (yield from source.matches(layout.section_end)):
            return True
        if sink.calls > before and not layout.call[0]:
            return False
        if not (yield from source.matches(layout.call[0])):
            if sink.calls > before:
                return False
            raise NotACall
        yield from _call(source, sink, layout)
        source.keep()


def _skip(source: TextSource, layout: TagLayout) -> Steps[None]:
    yield from source.skip()
    while (yield from source.first_of(layout.around)):
        yield from source.skip()


def _call(source: TextSource, sink: CallSink, layout: TagLayout) -> Steps[None]:
    """Read one call behind its start marker. Arguments stream as JSON; a call that the answer's end
    cuts off stays open. Raises `NotACall` for a tool that is not offered."""
    if layout.call[1]:
        header = yield from source.until(layout.call[1], LONGEST_NAME)
    else:
        header = yield from _first_word(source)
    name = sink.name_of(_name_in(header))
    sink.start(name)
    yield from source.skip()
    if (yield from source.peek()) == "{":
        yield from _object(source, sink, layout)
        return
    sink.arguments("{")
    types, given, repaired, ended = sink.types_of(name), set[str](), False, False
    while True:
        source.keep()
        yield from source.skip()
        if not (yield from source.matches(layout.key[0])):
            ended = yield from _call_end(source, layout)
            break
        header = yield from source.until(layout.key[1], LONGEST_NAME)
        found = NAME.match(header or "")
        if header is None or found is None:
            break
        key = found[1]
        declared = TEXT if 'string="true"' in header else types.get(key, ANY)
        if layout.value_start:
            yield from source.skip()
            if layout.type[0] and (yield from source.matches(layout.type[0])):
                kind = yield from source.until(layout.type[1], LONGEST_NAME)
                declared = TEXT if kind == "string" and declared == ANY else declared
                yield from source.skip()
            yield from source.matches(layout.value_start)
        sink.arguments((", " if given else "") + as_json(key) + ": ")
        given.add(key)
        closed = yield from _value(
            source, sink, layout, declared, lambda key: key in types and key not in given
        )
        repaired = repaired or not closed
    if not source.cut or ended:
        sink.arguments("}")
    else:
        yield from source.drop()
    sink.end(repaired=(repaired or not ended) and not source.cut)


def _object(source: TextSource, sink: CallSink, layout: TagLayout) -> Steps[None]:
    """Read arguments that a model has written as an object in place of tags."""
    yield from stream_object(source, sink, Ends(layout.ends[0], layout.ends))
    yield from source.skip()
    yield from source.matches(layout.call_end)
    sink.end(repaired=not source.cut)


def _call_end(source: TextSource, layout: TagLayout) -> Steps[bool]:
    if layout.call_end:
        return (yield from source.matches(layout.call_end))
    return (yield from source.peek()) != END or not source.cut


def _name_in(header: str | None) -> str:
    found = NAME.match(header or "")
    if found is None:
        raise NotACall
    return found[1]


def _first_word(source: TextSource) -> Steps[str]:
    word = ""
    while len(word) <= LONGEST_NAME:
        char = yield from source.peek()
        if char in (END, "\n", "<"):
            return word
        word += yield from source.next()
    raise NotACall


def _value(
    source: TextSource, sink: CallSink, layout: TagLayout, types: SchemaTypes, others: Others
) -> Steps[bool]:
    """`others`: parameters that may yet come. Returns whether the end was read."""
    if types == TEXT:
        sink.arguments('"')
        closed = yield from _text(
            source, sink, layout, others, lambda text: sink.arguments(as_json(text)[1:-1])
        )
        sink.arguments('"' if closed or not source.cut else "")
        return closed
    parts: list[str] = []
    closed = yield from _text(source, sink, layout, others, parts.append)
    if closed or not source.cut:
        sink.arguments(converted("".join(parts), types))
    return closed


def _next_begins(source: TextSource, layout: TagLayout, others: Others) -> Steps[bool]:
    position = source.position
    header: str | None = None
    if (yield from source.first_of((f"\n{layout.key[0]}", layout.key[0]))):
        header = yield from source.until(layout.key[1], LONGEST_NAME, STOPS)
    source.rewind(position)
    named = None if header is None else NAME.match(header)
    return named is not None and others(named[1])


def _next_call_begins(source: TextSource, sink: CallSink, layout: TagLayout) -> Steps[bool]:
    position = source.position
    try:
        return (yield from _another_call(source, sink, layout))
    except NotACall:
        return False
    finally:
        source.rewind(position)


def _another_call(source: TextSource, sink: CallSink, layout: TagLayout) -> Steps[bool]:
    """Returns whether another call begins. Raises `NotACall` for a tool that is not offered."""
    if layout.lines:
        yield from source.matches("\n")
    ended = bool(layout.call_end) and (yield from source.matches(layout.call_end))
    if ended:
        yield from _skip(source, layout)
    if (yield from source.matches(layout.section_end)):
        yield from source.skip()
        if not (yield from source.matches(layout.section_start)):
            return False
        yield from _skip(source, layout)
    elif not ended:
        return False
    if not (yield from source.matches(layout.call[0])):
        return False
    header = (
        yield from source.until(layout.call[1], LONGEST_NAME, STOPS)
        if layout.call[1]
        else _first_word(source)
    )
    return header is not None and bool(sink.name_of(_name_in(header)))


def _text(
    source: TextSource,
    sink: CallSink,
    layout: TagLayout,
    others: Others,
    write: Callable[[str], None],
) -> Steps[bool]:
    """Returns False where another parameter or call begins, or the answer ends."""
    if layout.lines:
        yield from source.matches("\n")
    value_ends = (
        (f"\n{layout.value_end}", layout.value_end) if layout.lines else (layout.value_end,)
    )
    while True:
        source.keep()
        write(source.run(STOPS))
        source.keep()
        if source.is_dry:  # Go on with a run again, not with a single character.
            yield
            continue
        if (yield from source.first_of(value_ends)):
            return True
        if (yield from _next_begins(source, layout, others)) or (
            yield from _next_call_begins(source, sink, layout)
        ):
            return False
        char = yield from source.peek()
        if char == END or (yield from source.ends_with(layout.ends)):
            return False
        write((yield from source.next()))
