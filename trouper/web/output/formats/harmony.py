"""Harmony, the format of gpt-oss: messages with channels and recipients.

Source: https://github.com/openai/harmony (docs/format.md). `analysis` is reasoning, `final` and a
`commentary` without a recipient are content, a message to `functions.NAME` is a call.
"""

from __future__ import annotations

import re

from trouper.web.output.formats.call_sink import CallSink, NotACall
from trouper.web.output.formats.json_calls import Ends, stream_object
from trouper.web.output.formats.text_source import END, Steps, TextSource

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
THINKING = (f"{CHANNEL}analysis{MESSAGE}", "<|end|>")
MARKERS = (CHANNEL, MESSAGE, START, *ENDS, "<|constrain|>")
HEADER_BEGINNINGS = (CHANNEL, START, "assistant", " to=", "to=", MESSAGE)
LONGEST_HEADER = 512
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"to=([^\s<]+)")
STOPS = re.compile("<")


def harmony_answer(source: TextSource, sink: CallSink, *, thinks: bool) -> Steps[None]:
    if thinks:
        sink.kind = "reasoning"
        yield from _body(source, sink)
    while True:
        source.keep()
        yield from source.skip()
        if (yield from source.peek()) == END:
            return
        yield from _message(source, sink)
        sink.kind = "content"


def _message(source: TextSource, sink: CallSink) -> Steps[None]:
    position = source.position
    if not (yield from source.first_of(HEADER_BEGINNINGS)):
        source.rewind(0)  # Whitespace in front belongs to the text.
        sink.content((yield from source.skip()))
        yield from _body(source, sink)
        return
    source.rewind(position)
    header = yield from source.until(MESSAGE, LONGEST_HEADER)
    if header is None:
        yield from _without_message(source, sink)
        return
    recipient, channel = RECIPIENT.search(header), CHANNEL_NAME.search(header)
    if recipient is not None and recipient[1] != "assistant":
        yield from _call(source, sink, recipient[1])
        return
    sink.kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
    yield from _body(source, sink)


def _without_message(source: TextSource, sink: CallSink) -> Steps[None]:
    """Read a header without a message: text, unless the answer ends."""
    marker = yield from source.first_of(HEADER_BEGINNINGS)
    if marker not in MARKERS:
        sink.content(marker)
        yield from _body(source, sink)
        return
    text = ""
    while len(text) <= LONGEST_HEADER:
        char = yield from source.next()
        if char == END:
            return
        text += char
    sink.content(text)
    yield from _body(source, sink)


def _call(source: TextSource, sink: CallSink, recipient: str) -> Steps[None]:
    try:
        name = sink.name_of(recipient)
        yield from source.skip()
        if (yield from source.peek()) != "{":
            yield from _expect_end(source)
            sink.add_call(name, "{}", repaired=True)
            return
    except NotACall:
        sink.report("no_call")
        yield from _body(source, sink)
        return
    sink.kind = "call"
    sink.start(name)
    repaired = yield from stream_object(source, sink, Ends("<|call|>", ENDS))
    sink.end(repaired=repaired and not source.cut)
    yield from source.skip()
    yield from source.first_of(ENDS)


def _expect_end(source: TextSource) -> Steps[None]:
    """Raises `NotACall` if the message has text."""
    ended = bool((yield from source.first_of(ENDS))) or (
        (yield from source.peek()) == END and not source.cut
    )
    if not ended:
        raise NotACall


def _body(source: TextSource, sink: CallSink) -> Steps[None]:
    write = sink.reasoning if sink.kind == "reasoning" else sink.content
    while True:
        source.keep()
        write(source.run(STOPS))
        source.keep()
        if source.is_dry:  # Go on with a run again, not with a single character.
            yield
            continue
        if (yield from source.first_of(ENDS)):
            return
        position = source.position
        if (yield from source.first_of((START, CHANNEL))):
            source.rewind(position)
            return
        char = yield from source.next()
        if char == END:
            return
        write(char)
