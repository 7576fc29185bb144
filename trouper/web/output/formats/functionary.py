"""Functionary 3.2: a prompt ends with `>>>`, and each part of an answer begins with its recipient.

The recipient `all` is the user; any other is a tool, whose arguments follow as JSON.
"""

from __future__ import annotations

import re

from trouper.web.output.formats.call_sink import CallSink, NotACall
from trouper.web.output.formats.json_calls import LONGEST_NAME, Ends, stream_object
from trouper.web.output.formats.text_source import END, Steps, TextSource

MARKER, EVERYBODY = ">>>", "all"
STOPS = re.compile(r"[>\s]")
BLANKS = re.compile(r"\s+")
NO_NAME = re.compile(r"[\s<>{}\"]")


def functionary_answer(source: TextSource, sink: CallSink) -> Steps[None]:
    recipient: str | None = EVERYBODY
    if (yield from source.peek()) != MARKER[0]:
        recipient = (yield from _recipient(source, sink)) or EVERYBODY
    while recipient is not None:
        sink.kind = "content"
        recipient = yield from (
            _content(source, sink) if recipient == EVERYBODY else _call(source, sink, recipient)
        )


def _recipient(source: TextSource, sink: CallSink) -> Steps[str | None]:
    """Read the line of a recipient. None, with nothing read, if it is none."""
    position = source.position
    written = yield from source.until("\n", LONGEST_NAME, NO_NAME)
    if not written:
        return None
    if written == EVERYBODY:
        return written
    begins = (yield from source.peek()) == "{"
    try:
        name = sink.name_of(written)
    except NotACall:
        if begins:
            sink.report("no_call")
        begins = False
    if begins:
        return name
    source.rewind(position)
    return None


def _call(source: TextSource, sink: CallSink, name: str) -> Steps[str | None]:
    sink.kind = "call"
    sink.start(name)
    repaired = yield from stream_object(source, sink, Ends(MARKER))
    sink.end(repaired=repaired and not source.cut)
    source.keep()
    yield from source.skip()
    if (yield from source.peek()) == END:
        return None
    if (yield from source.matches(MARKER)):
        recipient = yield from _recipient(source, sink)
        if recipient is not None:
            return recipient
    source.rewind(0)
    yield from source.skip()
    return EVERYBODY


def _content(source: TextSource, sink: CallSink) -> Steps[str | None]:
    """Read content up to the next call's recipient, who is returned; None at the answer's end."""
    # Whitespace in front of a call is no content.
    space: list[str] = []
    while True:
        source.keep()
        text = source.run(STOPS)
        if not text and source.is_dry:
            yield
            continue
        if not text and (blanks := source.take(BLANKS)):
            if not space:
                sink.held_from = source.offset - len(blanks)
            space.append(blanks)
            continue
        if not text and (yield from source.matches(MARKER)):
            recipient = yield from _recipient(source, sink)
            if recipient is not None:
                sink.held_from = None
                return recipient
            source.rewind(0)
        if not text and not (text := (yield from source.next())):
            sink.content("".join(space))
            return None
        sink.content("".join(space) + text)
        space.clear()
        sink.held_from = None
