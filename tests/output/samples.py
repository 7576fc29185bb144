"""Answers in each format: how each family writes the same reasoning, text and calls; and texts made
of its parts at random."""

from __future__ import annotations

import json
import random
from typing import Any

import attrs

from tests.fakes import ByteTokenizer
from trouper.engine.loading.call_parsers import ParseTool
from trouper.engine.loading.output_format_detection import of_names
from trouper.protocol.output_formats import (
    BUFFERED_TOOL_PARSERS,
    FUNCTIONARY_32,
    HARMONY,
    THINKING,
)
from trouper.web.output.formats.call_sink import Report
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.parsed_delta import (
    CallArguments,
    CallStarted,
    ParsedDelta,
    ParsedOutput,
    gathered,
)
from trouper.web.output.tool_calls import Tools

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "line": {"type": "integer"},
                "options": {"type": "object"},
            },
        },
    },
}
TOOLS = Tools((TOOL,))
ARGUMENTS = {"path": 'ä "q" <b>\n  x', "line": 7, "options": {"deep": [1, None, True]}}
BAR = "｜"
NAMESPACE = "]<]minimax[>["


def written(arguments: dict[str, Any]) -> dict[str, str]:
    """Write one call of `edit` in each format."""
    as_json = json.dumps(arguments, ensure_ascii=False)
    call = json.dumps({"name": "edit", "arguments": arguments}, ensure_ascii=False)

    def hy(suffix: str) -> str:
        pairs = tagged(
            f"<arg_key{suffix}>NAME</arg_key{suffix}>\n<arg_value{suffix}>",
            f"</arg_value{suffix}>\n",
        )
        return (
            f"<tool_calls{suffix}>\n<tool_call{suffix}>edit<tool_sep{suffix}>\n{pairs}"
            f"</tool_call{suffix}>\n</tool_calls{suffix}>"
        )

    def marked(token: str, section: str, space: str = "") -> str:
        pairs = tagged(f'<{token}{space}parameter name="NAME">', f"</{token}{space}parameter>\n")
        return (
            f'<{token}{section}>\n<{token}{space}invoke name="edit">\n{pairs}'
            f"</{token}{space}invoke>\n</{token}{section}>"
        )

    def tagged(before: str, behind: str) -> str:
        texts = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in arguments.items()
        }
        return "".join(before.replace("NAME", name) + text + behind for name, text in texts.items())

    return {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "longcat": f"<longcat_tool_call>\n{call}\n</longcat_tool_call>",
        "qwen3_coder": "<tool_call>\n<function=edit>\n"
        + tagged("<parameter=NAME>\n", "\n</parameter>\n")
        + "</function>\n</tool_call>",
        "glm": "<tool_call>edit\n"
        + tagged("<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>\n")
        + "</tool_call>",
        "laguna": "<tool_call>edit\n"
        + tagged("<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>\n")
        + "</tool_call>",
        "iquest_coder_v2": "<iquestcoder_tool_call>edit\n"
        + tagged("<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>\n")
        + "</iquestcoder_tool_call>",
        "k2_horizon": "<ifm|tool_calls>\n<ifm|tool_call>edit\n"
        + tagged("<ifm|arg_key>NAME</ifm|arg_key>\n<ifm|arg_value>", "</ifm|arg_value>\n")
        + "</ifm|tool_call>\n</ifm|tool_calls>",
        "command_r": 'Action: ```json\n[\n    {\n        "tool_name": "edit",\n        "parameters": '
        f"{as_json}\n    }}\n]```",
        "rwkv": f"**Tool Call:**\n\n```json\n{call}\n```",
        "mirothinker": "<use_mcp_tool>\n<server_name>tools</server_name>\n<tool_name>edit</tool_name>"
        f"\n<arguments>\n{as_json}\n</arguments>\n</use_mcp_tool>",
        "plamo3": "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
        "<|plamo:begin_tool_name:plamo|>edit<|plamo:end_tool_name:plamo|>"
        "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
        f"{as_json}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
        "<|plamo:end_tool_requests:plamo|>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="edit">\n'
        + tagged('<parameter name="NAME">', "</parameter>\n")
        + "</invoke>\n</minimax:tool_call>",
        "deepseek_v32": marked(f"{BAR}DSML{BAR}", "function_calls"),
        "deepseek_v4": marked(f"{BAR}DSML{BAR}", "tool_calls"),
        "deepseek_v41": marked(f"{BAR}DSML{BAR}", " calls", " "),
        "gigachat35": marked(f"{BAR}GCML{BAR}", "tool_calls"),
        "dots": '<dots_function_call>\n<invoke name="edit">\n'
        + tagged('<parameter name="NAME">', "</parameter>\n")
        + "</invoke>\n</dots_function_call>",
        "hy_v3": hy(""),
        "hy_v3_opensource": hy(":opensource"),
        "hunyuan": "<tool_calls>\n<tool_call>edit\n```json\n"
        f"{as_json}\n```</tool_call>\n</tool_calls>",
        "functionary_v31": f"<function=edit>{as_json}</function>",
        FUNCTIONARY_32: f">>>edit\n{as_json}",
        "solar_open": "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>edit"
        f"<|tool_call:args|>{as_json}<|tool_call:end|>",
        "solar_open2": "<|tool_call:start|>edit\n"
        + tagged("<|tool_arg:start|>NAME<|tool_arg:value|>", "<|tool_arg:end|>\n")
        + "<|tool_call:end|>",
        "step3": f"<{BAR}tool_calls_begin{BAR}>\n<{BAR}tool_call_begin{BAR}>function"
        f'<{BAR}tool_sep{BAR}><steptml:invoke name="edit">\n'
        + tagged('<steptml:parameter name="NAME">', "</steptml:parameter>\n")
        + f"</steptml:invoke><{BAR}tool_call_end{BAR}>\n<{BAR}tool_calls_end{BAR}>",
        "nemotron_mini": f"<toolcall> {call} </toolcall>",
        "openpangu": f"[unused11][{call}][unused12]",
        "xlam": f"[{call}]",
        "seed_oss": "<seed:tool_call>\n<function=edit>\n"
        + tagged("<parameter=NAME>", "</parameter>\n")
        + "</function>\n</seed:tool_call>",
        "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "edit", "parameters": '
        + as_json
        + "}\n]<|END_ACTION|>",
        "gigachat3": f"<|function_call|>{call}",
        "granite": f"<|tool_call|>[{call}]",
        "granite_20b_fc": f"<function_call> {call}",
        "internlm": f"<|action_start|><|plugin|>\n{call}<|action_end|>",
        "jamba": f"<tool_calls>[{call}]</tool_calls>",
        "nemotron_v2": f"<TOOLCALL>[{call}]</TOOLCALL>",
        "phi4_mini_json": f"functools[{call}]",
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>edit\n"
        f"```json\n{as_json}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>"
        f"{as_json}<|tool_call_end|><|tool_calls_section_end|>",
        "mistral": f"[TOOL_CALLS]edit[ARGS]{as_json}",
        "llama3_json": '<|python_tag|>{"name": "edit", "parameters": ' + as_json + "}",
        HARMONY: "<|start|>assistant<|channel|>commentary to=functions.edit <|constrain|>json<|message|>"
        f"{as_json}<|call|>",
    }


PYTHON = 'edit(path=\'ä "q" <b>\\n  x\', line=7, options={"deep": [1, null, true]})'


def _kimi_argument(name: str, value: Any) -> str:
    kind = "string" if isinstance(value, str) else "object"
    text = value if isinstance(value, str) else json.dumps(value)
    return f'<|open|>argument key="{name}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'


CALLS = written(ARGUMENTS) | {
    "gemma4": '<|tool_call>call:edit{path:<|"|>ä "q" <b>\n  x<|"|>,line:7,options:{deep:[1,null,true]}}<tool_call|>',
    "apertus": f'<|tools_prefix|>[{{"edit": {json.dumps(ARGUMENTS)}}}]<|tools_suffix|>',
    "cwm": f"<tool: edit>\n{json.dumps(ARGUMENTS, ensure_ascii=False)}\n</tool>",
    "olmo3": f"<function_calls>\n{PYTHON}\n</function_calls>",
    "lfm2": f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    "pythonic": f"<|python_start|>[{PYTHON}]<|python_end|>",
    "function_gemma": '<start_function_call>call:edit{path:<escape>ä "q" <b>\n  x<escape>,line:7,'
    "options:{deep:[1,null,true]}}<end_function_call>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="edit" index="1"<|sep|>'
    + "".join(_kimi_argument(*item) for item in ARGUMENTS.items())
    + "<|close|>call<|sep|><|close|>tools<|sep|>",
    "minicpm5": '<function name="edit"><param name="path"><![CDATA[ä "q" <b>\n  x]]></param>'
    '<param name="line">7</param><param name="options">{"deep": [1, null, true]}</param>'
    "</function>",
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="edit">\n'
    '<atem:parameter name="path">ä "q" <b>\n  x</atem:parameter>\n'
    '<atem:parameter name="line">7</atem:parameter>\n'
    '<atem:parameter name="options">{"deep": [1, null, true]}</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "minimax_m3": (
        '<tool_call>\n<invoke name="edit"><path>ä "q" <b>\n  x</path><line>7</line>'
        "<options><deep><item>1</item><item>null</item><item>true</item></deep></options></invoke>\n"
        "</tool_call>"
    )
    .replace("<", f"{NAMESPACE}<")
    .replace(f"{NAMESPACE}<b>", "<b>"),
}
"""One call of `edit` with `ARGUMENTS`, as each format has it."""


@attrs.define
class FormatTokenizer(ByteTokenizer):
    """A tokenizer of a model that writes the given formats."""

    tool_parser: str | None
    reasoning_parser: str | None
    thinking: tuple[str, str] | None  # type: ignore[assignment]
    calling: tuple[str, str] | None = None  # type: ignore[assignment]
    parse: ParseTool | None = None

    @classmethod
    def of(cls, name: str) -> FormatTokenizer:
        reasoning = name if name in THINKING else "think"
        found = of_names(name, reasoning)
        return cls(name, reasoning, THINKING[reasoning], found.calling, found.parse)

    def parse_calls(self, text: str, tools: Any) -> list[tuple[str, str]]:
        assert self.parse is not None
        found = self.parse(text, list(tools))
        return [
            (str(call["name"]), json.dumps(call["arguments"]))
            for call in (found if isinstance(found, list) else [found])
        ]


def parser(
    name: str, *, tools: Tools = TOOLS, thinks: bool = False, report: Report | None = None
) -> OutputParser:
    reported = report or (lambda _outcome: None)
    return OutputParser(tools, FormatTokenizer.of(name), thinks=thinks, report=reported)


def played(
    name: str, pieces: list[str], *, cut: bool = False, thinks: bool = False
) -> list[tuple[str, str]]:
    """Parse an answer that comes in pieces: kinds and texts, neighbours of one kind joined."""
    reading = parser(name, thinks=thinks)
    deltas = [delta for piece in pieces for delta in reading.push(piece)] + reading.end(cut=cut)
    return joined(deltas)


def parse_complete(reading: OutputParser, text: str, reason: str) -> ParsedOutput:
    deltas = [*reading.push(text), *reading.end(cut=reason == "length")]
    return gathered(deltas, reading.reason(reason))


def joined(deltas: list[ParsedDelta]) -> list[tuple[str, str]]:
    parts: list[tuple[str, str]] = []
    for delta in deltas:
        kind = type(delta).__name__
        text = delta.name if isinstance(delta, CallStarted) else getattr(delta, "text", "")
        if parts and parts[-1][0] == kind and not isinstance(delta, CallStarted):
            text, _ = parts.pop()[1] + text, None
        parts.append((kind, text))
    return parts


def arguments_of(parts: list[tuple[str, str]]) -> list[str]:
    return [text for kind, text in parts if kind == CallArguments.__name__]


def pieces_of(text: str, drawn: random.Random) -> list[str]:
    cuts = sorted(drawn.randrange(len(text) + 1) for _ in range(drawn.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


NAMES = sorted(CALLS)
STREAMED = [name for name in NAMES if name not in BUFFERED_TOOL_PARSERS]


def random_text(name: str, drawn: random.Random) -> str:
    """Calls and markers, whole and broken, among text and reasoning."""
    call = CALLS[name]
    thinking = THINKING[str(FormatTokenizer.of(name).reasoning_parser)]
    parts = [
        *thinking,
        "a",
        " ",
        "\n",
        "\n\n",
        "<",
        '{"',
        "}",
        "]",
        "```",
        "edit",
        '"',
        "\\",
        "'",
        ",",
        ":",
    ]
    text = ""
    for _ in range(drawn.randrange(1, 9)):
        match drawn.randrange(5):
            case 0:
                text += call
            case 1:
                begin = drawn.randrange(len(call))
                text += call[begin : begin + drawn.randrange(len(call))]
            case 2:
                begin = drawn.randrange(len(call))
                text += call[:begin] + drawn.choice(parts) + call[begin + drawn.randrange(3) :]
            case _:
                text += drawn.choice(parts)
    return text
