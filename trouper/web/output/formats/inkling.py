"""Inkling: messages `<|message_model|>NAME<|content_KIND|>TEXT<|end_message|>`.

NAME is the called tool's. The prompt ends behind the first `<|message_model|>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from trouper.web.output.formats.call_sink import CallSink, NotACall
from trouper.web.output.formats.json_calls import LONGEST_NAME, Ends, json_section
from trouper.web.output.formats.text_source import END, SPACE, Steps, TextSource

MESSAGE, THINKING, TEXT = "<|message_model|>", "<|content_thinking|>", "<|content_text|>"
CALL = "<|content_invoke_tool_json|>"
ENDS = ("<|end_message|>", "<|content_model_end_sampling|>")
OTHERS = ("<|content_invoke_tool_text|>", "<|content_tool_error|>")
"""Kinds that are shown as text."""
BEGINNINGS = (MESSAGE, THINKING, TEXT, CALL, *OTHERS)
NAME = re.compile(r"[\w.-]")
NAME_STOPS = re.compile(r"[^\w.-]")
STOPS = re.compile("<")
WORDS = re.compile(r"[^<]*[^<\s]")


def inkling_answer(source: TextSource, sink: CallSink, *, thinks: bool) -> Steps[None]:
    kind = THINKING if thinks else ""
    while True:
        source.keep()
        kind = kind or (yield from _kind(source))
        if kind == END:
            return
        if kind == CALL:
            yield from _call(source, sink)
        elif kind == THINKING:
            sink.kind = "reasoning"
            yield from _reasoning(source, sink.reasoning)
        else:
            sink.kind = "content"
            yield from _text(source, sink.content)
        kind = ""


def _kind(source: TextSource) -> Steps[str]:
    """Read the beginning of a message; "" at the end. Text without a beginning is text."""
    while True:
        yield from source.skip()
        marker = yield from source.first_of((*ENDS, *BEGINNINGS))
        if marker and marker != MESSAGE and marker not in ENDS:
            source.keep()
            return marker
        if not marker:
            break
        source.keep()
    position = source.position
    if (yield from source.peek()) == END:
        return END
    if NAME.match((yield from source.peek())):
        while len(source.kept) <= LONGEST_NAME and NAME.match((yield from source.peek())):
            yield from source.next()
        if (yield from source.matches(CALL)):
            return CALL
    source.rewind(0 if position else position)
    return TEXT


def _call(source: TextSource, sink: CallSink) -> Steps[None]:
    before, sink.kind = sink.calls, "call"
    try:
        yield from json_section(source, sink, Ends(ENDS[0], ENDS, CALL))
    except NotACall:
        sink.kind = "content"
        sink.report("no_call")
        if source.position > 1:  # The last character may begin a marker.
            source.rewind(source.position - 1)
        sink.content(source.kept)
        if sink.calls == before:
            yield from _text(source, sink.content)


def _text(source: TextSource, write: Callable[[str], None]) -> Steps[None]:
    while True:
        source.keep()
        write(source.run(STOPS))
        source.keep()
        if source.is_dry:  # Go on with a run again, not with a single character.
            yield
        elif (yield from _ends(source)):
            return
        else:
            write((yield from source.next()))


def _reasoning(source: TextSource, write: Callable[[str], None]) -> Steps[None]:
    """Line breaks at both ends are no part of it."""
    blank = [(yield from source.skip())]
    blank.clear()
    while True:
        source.keep()
        if text := source.take(WORDS):
            write("".join(blank) + text)
            blank.clear()
        elif source.is_dry:
            yield
        elif (yield from _ends(source)):
            return
        elif (yield from source.peek()) in SPACE:
            blank.append((yield from source.skip()))
        else:
            write("".join(blank) + (yield from source.next()))
            blank.clear()


def _ends(source: TextSource) -> Steps[bool]:
    """Whether the message ends here. A message whose end is missing ends where another begins."""
    if (yield from source.first_of(ENDS)) or (yield from source.peek()) == END:
        return True
    position = source.position
    begins = bool((yield from source.first_of(BEGINNINGS)))
    source.rewind(position)
    return begins
