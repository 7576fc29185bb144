"""Calls as a header with the tool's name, then arguments as JSON: DeepSeek V3, Kimi K2, Mistral,
Hunyuan, Functionary 3.1, Solar Open, PLaMo 3, MiroThinker."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from re import Match

import attrs

from trouper.web.output.formats.call_sink import CallSink, NotACall
from trouper.web.output.formats.json_calls import (
    LONGEST_NAME,
    NO_END,
    Ends,
    json_section,
    stream_object,
)
from trouper.web.output.formats.text_source import SPACE, Steps, TextSource

DEEPSEEK_HEADER = re.compile(
    r"(?:function)?\s*+(?:<｜tool▁sep｜>\s*+)?([^\s<]++)\s*+"
    r"(?:<｜tool▁sep｜>\s*+)?(?:```(?:json)?\s*+)?"
)
MISTRAL_HEADER = re.compile(r"\s*+([^\s\[\]]++)\s*+(?:\[CALL_ID\][^\[\]]*+)?(?:\[ARGS\]\s*+)?")
HUNYUAN_HEADER = re.compile(r"\s*+([^\s<`]++)\s*+(?:```(?:json)?\s*+)?")
FUNCTIONARY_HEADER = re.compile(r"([^\s<>]++)>\s*+")
SOLAR_HEADER = re.compile(r"[^<]*+<\|tool_call:name\|>\s*+([^\s<]++)\s*+<\|tool_call:args\|>\s*+")
MIROTHINKER_HEADER = re.compile(
    r"[^<]*+</server_name>\s*+<tool_name>\s*+([^<]++)</tool_name>\s*+<arguments>\s*+"
)
PLAMO_HEADER = re.compile(
    r"\s*+<\|plamo:begin_tool_name:plamo\|>([^<]++)<\|plamo:end_tool_name:plamo\|>\s*+"
    r"<\|plamo:begin_tool_arguments:plamo\|>(?:<\|plamo:constrain\|>json<\|plamo:msg\|>)?+\s*+"
)
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"


def _name_by(matched: Callable[[str], Match[str] | None], header: str) -> str | None:
    match = matched(header)
    return match and match[1]


def _kimi_name(header: str) -> str | None:
    written, marker, behind = header.rpartition(KIMI_ARGUMENTS)
    if not marker or behind.strip():
        return None
    name, _, index = written.strip().rpartition(":")
    return name if name and index.isdecimal() else written.strip()


@attrs.frozen
class HeaderLayout:
    call_start: str
    name_in: Callable[[str], str | None]
    call_end: str
    section_end: str
    other_end: str = ""


DEEPSEEK = HeaderLayout(
    "<｜tool▁call▁begin｜>",
    partial(_name_by, DEEPSEEK_HEADER.fullmatch),
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
FUNCTIONARY = HeaderLayout(
    "<function=", partial(_name_by, FUNCTIONARY_HEADER.fullmatch), "</function>", ""
)
HUNYUAN = HeaderLayout(
    "<tool_call>", partial(_name_by, HUNYUAN_HEADER.fullmatch), "</tool_call>", "</tool_calls>"
)
SOLAR = HeaderLayout(
    "<|tool_call:begin|>",
    partial(_name_by, SOLAR_HEADER.fullmatch),
    "<|tool_call:end|>",
    "<|calls|>",
)
KIMI = HeaderLayout(
    "<|tool_call_begin|>",
    _kimi_name,
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_end|>",
)
MIROTHINKER = HeaderLayout(
    "<server_name>",
    partial(_name_by, MIROTHINKER_HEADER.fullmatch),
    "</arguments>",
    "</use_mcp_tool>",
)
PLAMO = HeaderLayout(
    "<|plamo:begin_tool_request:plamo|>",
    partial(_name_by, PLAMO_HEADER.fullmatch),
    "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
    "<|plamo:end_tool_requests:plamo|>",
)
MISTRAL = HeaderLayout("[TOOL_CALLS]", partial(_name_by, MISTRAL_HEADER.fullmatch), "", "")
"""`MarkedAnswer` has read the first call's start."""


def header_section(source: TextSource, sink: CallSink, layout: HeaderLayout) -> Steps[bool]:
    """Read calls up to the section's end. Returns whether its end marker was read; False where
    other text follows a call. Raises `NotACall` without any call."""
    before = sink.calls
    ends = (layout.section_end, layout.other_end)
    while True:
        yield from source.skip()
        has_call = sink.calls > before
        if has_call and (yield from source.first_of(ends)):
            return True
        if not (yield from source.matches(layout.call_start)):
            if has_call:
                return False
            if layout is not MISTRAL:
                raise NotACall
        yield from _call(source, sink, layout)
        source.keep()


def _call(source: TextSource, sink: CallSink, layout: HeaderLayout) -> Steps[None]:
    header = ""
    while (yield from source.peek()) != "{":
        char = yield from source.next()
        header += char
        if not char or len(header) > LONGEST_NAME:
            raise NotACall
    if (name := layout.name_in(header)) is None:
        raise NotACall
    sink.start(sink.name_of(name))
    repaired = yield from stream_object(
        source, sink, Ends(layout.call_end, (layout.section_end, layout.other_end))
    )
    if layout.call_end:
        yield from source.skip(SPACE + "`")
        yield from source.matches(layout.call_end)
    sink.end(repaired=repaired and not source.cut)


def mistral_section(source: TextSource, sink: CallSink) -> Steps[bool]:
    """Read calls behind [TOOL_CALLS]: a list of objects, or headers."""
    yield from source.skip()
    if (yield from source.peek()) in ("[", "{"):
        return (yield from json_section(source, sink, NO_END))
    return (yield from header_section(source, sink, MISTRAL))
