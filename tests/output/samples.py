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
from trouper.protocol.output_formats import BUFFERED_TOOL_PARSERS, HARMONY, THINKING
from trouper.web.output.formats.call_sink import Report
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.parsed_delta import CallArguments, CallStarted, ParsedDelta
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


def written(arguments: dict[str, Any]) -> dict[str, str]:
    """Write one call of `edit` in each format."""
    as_json = json.dumps(arguments, ensure_ascii=False)
    call = json.dumps({"name": "edit", "arguments": arguments}, ensure_ascii=False)

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
        "minimax_m2": '<minimax:tool_call>\n<invoke name="edit">\n'
        + tagged('<parameter name="NAME">', "</parameter>\n")
        + "</invoke>\n</minimax:tool_call>",
        "deepseek_v32": f'<{BAR}DSML{BAR}function_calls>\n<{BAR}DSML{BAR}invoke name="edit">\n'
        + tagged(f'<{BAR}DSML{BAR}parameter name="NAME">', f"</{BAR}DSML{BAR}parameter>\n")
        + f"</{BAR}DSML{BAR}invoke>\n</{BAR}DSML{BAR}function_calls>",
        "deepseek_v4": f'<{BAR}DSML{BAR}tool_calls>\n<{BAR}DSML{BAR}invoke name="edit">\n'
        + tagged(f'<{BAR}DSML{BAR}parameter name="NAME">', f"</{BAR}DSML{BAR}parameter>\n")
        + f"</{BAR}DSML{BAR}invoke>\n</{BAR}DSML{BAR}tool_calls>",
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


CALLS = written(ARGUMENTS) | {
    "gemma4": '<|tool_call>call:edit{path:<|"|>ä "q" <b>\n  x<|"|>,line:7,options:{deep:[1,null,true]}}<tool_call|>',
    "apertus": f'<|tools_prefix|>[{{"edit": {json.dumps(ARGUMENTS)}}}]<|tools_suffix|>',
    "olmo3": "<function_calls>\nedit(path='ä \"q\" <b>\\n  x', line=7, "
    'options={"deep": [1, null, true]})\n</function_calls>',
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
        reasoning = name if name in (HARMONY, "gemma4", "cohere", "seed_oss") else "think"
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
