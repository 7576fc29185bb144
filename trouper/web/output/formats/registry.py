"""Output formats by name (--tool-parser)."""

from __future__ import annotations

import json
import re
from functools import partial

import attrs

from trouper.protocol.model import Tokenizer
from trouper.protocol.output_formats import ANSWERING, FUNCTIONARY_32, HARMONY, OWN_MARKERS
from trouper.web.output.formats.buffered_calls import buffered_section, python_section
from trouper.web.output.formats.call_sink import CallSink, NotACall
from trouper.web.output.formats.functionary import functionary_answer
from trouper.web.output.formats.harmony import harmony_answer
from trouper.web.output.formats.header_calls import (
    DEEPSEEK,
    FUNCTIONARY,
    HUNYUAN,
    KIMI,
    MIROTHINKER,
    PLAMO,
    SOLAR,
    HeaderLayout,
    header_section,
    mistral_section,
)
from trouper.web.output.formats.json_calls import NO_END, Ends, json_section
from trouper.web.output.formats.marked_answer import NO_CALLS, CallFormat, MarkedAnswer
from trouper.web.output.formats.tagged_calls import TagLayout, tagged_section
from trouper.web.output.formats.text_source import END, Steps, TextSource
from trouper.web.output.tool_calls import Tools
from trouper.web.output.tool_forms import INPUT

NEVER = re.compile("(?!)")
FENCE = "```"

QWEN3_CODER = TagLayout(
    call=("<function=", ">"),
    call_end="</function>",
    key=("<parameter=", ">"),
    value_end="</parameter>",
    section_start="<tool_call>",
    section_end="</tool_call>",
    lines=True,
)
GLM = TagLayout(
    call=("", ""),
    key=("<arg_key>", "</arg_key>"),
    value_start="<arg_value>",
    value_end="</arg_value>",
    section_start="<tool_call>",
    section_end="</tool_call>",
)
IQUEST_2 = attrs.evolve(
    GLM, section_start="<iquestcoder_tool_call>", section_end="</iquestcoder_tool_call>"
)
K2 = TagLayout(
    call=("<ifm|tool_call>", ""),
    call_end="</ifm|tool_call>",
    key=("<ifm|arg_key>", "</ifm|arg_key>"),
    type=("<ifm|arg_type>", "</ifm|arg_type>"),
    value_start="<ifm|arg_value>",
    value_end="</ifm|arg_value>",
    section_start="<ifm|tool_calls>",
    section_end="</ifm|tool_calls>",
)


def _invokes(prefix: str, section_start: str, section_end: str) -> TagLayout:
    """Return a layout of calls as `<invoke name=...>` with `<parameter name=...>`; `prefix` stands
    in front of both words."""
    return TagLayout(
        call=(f"<{prefix}invoke name=", ">"),
        call_end=f"</{prefix}invoke>",
        key=(f"<{prefix}parameter name=", ">"),
        value_end=f"</{prefix}parameter>",
        section_start=section_start,
        section_end=section_end,
    )


MINIMAX = attrs.evolve(_invokes("", "<minimax:tool_call>", "</minimax:tool_call>"), lines=True)
DSML = _invokes("｜DSML｜", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
DSML_4 = attrs.evolve(
    DSML, section_start="<｜DSML｜tool_calls>", section_end="</｜DSML｜tool_calls>"
)

# The space in front of each name is DeepSeek's.
DSML_41 = _invokes("｜DSML｜ ", "<｜DSML｜ calls>", "</｜DSML｜ calls>")
GCML = _invokes("｜GCML｜", "<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>")
DOTS = attrs.evolve(
    MINIMAX, section_start="<dots_function_call>", section_end="</dots_function_call>"
)
SEED = attrs.evolve(QWEN3_CODER, section_start="<seed:tool_call>", section_end="</seed:tool_call>")
SOLAR_2 = TagLayout(
    call=("", ""),
    key=("<|tool_arg:start|>", "<|tool_arg:value|>"),
    value_end="<|tool_arg:end|>",
    section_start="<|tool_call:start|>",
    section_end="<|tool_call:end|>",
)
STEP = attrs.evolve(
    _invokes("steptml:", "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    around=("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
)


def _hy(suffix: str) -> TagLayout:
    return TagLayout(
        call=(f"<tool_call{suffix}>", f"<tool_sep{suffix}>"),
        call_end=f"</tool_call{suffix}>",
        key=(f"<arg_key{suffix}>", f"</arg_key{suffix}>"),
        value_start=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
        section_start=f"<tool_calls{suffix}>",
        section_end=f"</tool_calls{suffix}>",
    )


TOOL_CALL = Ends(QWEN3_CODER.section_end, start=QWEN3_CODER.section_start)


def _tool_call_section(source: TextSource, sink: CallSink) -> Steps[bool]:
    # Models mix up objects and Qwen3-Coder's tags.
    yield from source.skip()
    if (yield from source.peek()) == QWEN3_CODER.call[0][0]:
        return (yield from tagged_section(source, sink, QWEN3_CODER))
    return (yield from json_section(source, sink, TOOL_CALL))


K2_OBJECT = Ends(K2.call_end, (K2.section_end,), K2.call[0])


def _k2_section(source: TextSource, sink: CallSink) -> Steps[bool]:
    # A template's `tool_call_format` makes calls objects or tags.
    before = sink.calls
    while True:
        yield from source.skip()
        position = source.position
        begun = yield from source.matches(K2.call[0])
        yield from source.skip()
        if not begun or (yield from source.peek()) != "{":
            source.rewind(position)
            if sink.calls > before and (yield from source.matches(K2.section_end)):
                return True
            if sink.calls > before and not begun:
                return False
            return (yield from tagged_section(source, sink, K2))
        yield from json_section(source, sink, K2_OBJECT)


def _fenced(start: str) -> CallFormat:
    """A block of Markdown with objects behind `start`."""
    ends = Ends(FENCE, start=start)

    def section(source: TextSource, sink: CallSink) -> Steps[bool]:
        yield from source.skip()
        if not (yield from source.matches(FENCE)):
            raise NotACall
        yield from source.matches("json")
        return (yield from json_section(source, sink, ends))

    return CallFormat((start,), section, FENCE)


def _json(start: str, end: str) -> CallFormat:
    return CallFormat((start,), partial(json_section, ends=Ends(end, start=start)), end)


def _tagged(layout: TagLayout) -> CallFormat:
    return CallFormat(
        (layout.section_start,), partial(tagged_section, layout=layout), layout.section_end
    )


def _header(layout: HeaderLayout, *starts: str) -> CallFormat:
    return CallFormat(
        starts,
        partial(header_section, layout=layout),
        layout.section_end,
        bare=(layout.call_start,),
    )


FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat(("<tool_call>",), _tool_call_section, TOOL_CALL.first),
    "longcat": _json("<longcat_tool_call>", "</longcat_tool_call>"),
    "qwen3_coder": CallFormat(
        ("<tool_call>",), _tool_call_section, TOOL_CALL.first, bare=QWEN3_CODER.call[:1]
    ),
    "glm": _tagged(GLM),
    "laguna": _tagged(GLM),
    "iquest_coder_v2": _tagged(IQUEST_2),
    "k2_horizon": CallFormat((K2.section_start,), _k2_section, K2.section_end),
    "minimax_m2": _tagged(MINIMAX),
    "deepseek_v32": _tagged(DSML),
    "deepseek_v4": _tagged(DSML_4),
    "deepseek_v41": _tagged(DSML_41),
    "dots": _tagged(DOTS),
    "gigachat35": _tagged(GCML),
    "hy_v3": _tagged(_hy("")),
    "hy_v3_opensource": _tagged(_hy(":opensource")),
    "seed_oss": _tagged(SEED),
    "solar_open2": _tagged(SOLAR_2),
    "step3": _tagged(STEP),
    "cohere": _json("<|START_ACTION|>", "<|END_ACTION|>"),
    "gigachat3": _json("<|function_call|>", ""),
    "granite": _json("<|tool_call|>", "<|/tool_call|>"),
    "granite_20b_fc": _json("<function_call>", ""),
    "internlm": _json("<|action_start|><|plugin|>", "<|action_end|>"),
    "jamba": _json("<tool_calls>", "</tool_calls>"),
    "nemotron_mini": _json("<toolcall>", "</toolcall>"),
    "nemotron_v2": _json("<TOOLCALL>", "</TOOLCALL>"),
    "openpangu": _json("[unused11]", "[unused12]"),
    "phi4_mini_json": _json("functools", ""),
    "command_r": _fenced("Action:"),
    "rwkv": _fenced("**Tool Call:**"),
    "deepseek_v3": _header(DEEPSEEK, "<｜tool▁calls▁begin｜>"),
    "kimi_k2": _header(KIMI, "<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    "functionary_v31": _header(FUNCTIONARY),
    "hunyuan": _header(HUNYUAN, "<tool_calls>"),
    "solar_open": _header(SOLAR, "<|tool_calls|>"),
    "plamo3": _header(PLAMO, "<|plamo:begin_tool_requests:plamo|>"),
    "mirothinker": CallFormat(
        ("<use_mcp_tool>",), partial(header_section, layout=MIROTHINKER), MIROTHINKER.section_end
    ),
    "mistral": CallFormat(("[TOOL_CALLS]",), mistral_section),
    "llama3_json": CallFormat(("<|python_tag|>",), partial(json_section, ends=NO_END), opening="{"),
    "xlam": CallFormat((), partial(json_section, ends=NO_END), opening="["),
}
"""Formats whose arguments are streamed."""
PYTHON: dict[str, tuple[str, ...]] = {
    "lfm2": ("lfm2",),
    "olmo3": ("olmo3",),
    "pythonic": ("pythonic", "lfm2"),
}
"""Formats of calls in Python, by the formats whose markers may stand around them."""


def answer_steps(
    source: TextSource, sink: CallSink, tools: Tools, tokenizer: Tokenizer, *, thinks: bool
) -> Steps[None]:
    if tools.freeform is not None:
        return _freeform(source, sink, tools.freeform)
    if tools.forced:
        return _forced(source, sink)
    if tokenizer.tool_parser == HARMONY:
        return harmony_answer(source, sink, thinks=thinks)
    if tokenizer.tool_parser == FUNCTIONARY_32:
        return functionary_answer(source, sink)
    calls = call_format(tools, tokenizer) if tools.offered else NO_CALLS
    answering = ANSWERING.get(tokenizer.reasoning_parser or "", ())
    return MarkedAnswer(source, sink, tokenizer.thinking, calls, answering).read(thinks=thinks)


def call_format(tools: Tools, tokenizer: Tokenizer) -> CallFormat:
    """Formats outside of `FORMATS` are parsed from complete calls."""
    name, markers = tokenizer.tool_parser, tokenizer.calling
    if name is None or (name not in FORMATS and markers is None):
        return NO_CALLS
    if name in FORMATS:
        return FORMATS[name]
    start, end = markers or ("", "")
    parse = partial(tokenizer.parse_calls, tools=tools.offered)
    if name in PYTHON:
        starts, ends = zip(*(OWN_MARKERS[each] for each in PYTHON[name]), strict=True)
        section = partial(python_section, ends=ends, parse=parse)
        return CallFormat(starts, section, ends[0], opening="[" if name == "pythonic" else "")
    return CallFormat((start,), partial(buffered_section, end=end, parse=parse), end)


def _freeform(source: TextSource, sink: CallSink, name: str) -> Steps[None]:
    sink.kind = "call"
    sink.start(name)
    sink.arguments(f'{{"{INPUT}": "')
    while (yield from source.peek()) != END:
        sink.arguments(json.dumps(source.run(NEVER), ensure_ascii=False)[1:-1])
        source.keep()
    sink.arguments('"}')
    sink.end()


def _forced(source: TextSource, sink: CallSink) -> Steps[None]:
    sink.kind = "call"
    try:
        yield from json_section(source, sink, NO_END)
    except NotACall:
        if (yield from source.peek()) == END:
            return  # The text is the server's own beginning of a call, which was cut.
        sink.kind = "content"
    while True:
        sink.content(source.kept)
        source.keep()
        if (yield from source.next()) == END:
            return
