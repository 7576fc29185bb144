"""Detects the format of a model's calls and reasoning.

A call rendered by the chat template decides; else its source and mlx-lm's detection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper

from trouper.engine.loading.call_parsers import PARSERS, ParseTool
from trouper.engine.loading.message_adaptation import Message
from trouper.engine.loading.template_probe import (
    CALL_MARK,
    TOOL,
    Render,
    TemplateReport,
    call_conversation,
)
from trouper.engine.loading.tokenizer_files import NAMED_PARSER
from trouper.protocol.output_formats import (
    ANSWERING,
    AUTO,
    BUFFERED_TOOL_PARSERS,
    CALL_MARKERS,
    HARMONY,
    NONE,
    OWN_MARKERS,
    REASONING_PARSER_ALIASES,
    THINKING,
    TOOL_PARSER_ALIASES,
    TOOL_PARSERS,
)

RENDERED = {
    HARMONY: r"to=functions\.probe_tool",
    "hy_v3": r"<tool_call>\s*probe_tool\s*<tool_sep>",
    "hy_v3_opensource": r"<tool_call:opensource>\s*probe_tool",
    "hunyuan": r"<tool_calls>\s*<tool_call>\s*probe_tool\b",
    "glm": r"<tool_call>\s*probe_tool\s*<arg_key>",
    "iquest_coder_v2": r"<iquestcoder_tool_call>\s*probe_tool",
    "k2_horizon": r"<ifm\|tool_call>",
    "mirothinker": r"<tool_name>probe_tool</tool_name>",
    "plamo3": r"<\|plamo:begin_tool_name:plamo\|>probe_tool",
    "rwkv": r"\*\*Tool Call:\*\*",
    "command_r": r"Action:\s*```json\s*(?:\[\s*)?\{",
    "cwm": r"<tool: ?probe_tool>",
    "minimax_m2": r'<minimax:tool_call>\s*<invoke name="probe_tool">',
    "minimax_m3": r'\]<\]minimax\[>\[\s*<invoke name="probe_tool">',
    "dots": r'<dots_function_call>\s*<invoke name="probe_tool">',
    "step3": r'<steptml:invoke name="probe_tool">',
    "gigachat35": r'<｜GCML｜invoke name="probe_tool">',
    "deepseek_v41": r'<｜DSML｜ invoke name="probe_tool">',
    "deepseek_v4": r'<｜DSML｜tool_calls>\s*<｜DSML｜invoke name="probe_tool">',
    "deepseek_v32": r'<｜DSML｜invoke name="probe_tool">',
    "seed_oss": r"<seed:tool_call>\s*<function=probe_tool>",
    "functionary_v31": r"<function=probe_tool>\s*\{",
    "functionary_v32": r">>>probe_tool\n",
    "qwen3_coder": r"<function=probe_tool>",
    "cohere": r"<\|START_ACTION\|>",
    "nemotron_v2": r"<TOOLCALL>",
    "nemotron_mini": r"<toolcall>",
    "openpangu": r"\[unused11\]",
    "solar_open": r"<\|tool_call:name\|>\s*probe_tool",
    "solar_open2": r"<\|tool_call:start\|>\s*probe_tool",
    "apertus": r'<\|tools_prefix\|>\s*+\[?\s*+\{"probe_tool"',
    "gigachat3": r"<\|function_call\|>",
    "granite": r'<\|tool_call\|>\s*+\[?\s*+\{"name": ?"probe_tool"',
    "granite_20b_fc": r'<function_call>\s*\{"name": ?"probe_tool"',
    "internlm": r"<\|action_start\|>\s*<\|plugin\|>",
    "jamba": r'<tool_calls>\s*+\[?\s*+\{"name": ?"probe_tool"',
    "phi4_mini_json": r'functools\s*\[\s*\{"name": ?"probe_tool"',
    "olmo3": r"<function_calls>\s*probe_tool\(",
    "deepseek_v3": r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?probe_tool",
    "kimi_k2": r"<\|tool_call_begin\|>(?:functions\.)?probe_tool",
    "mistral": r"\[TOOL_CALLS\]",
    "longcat": r"<longcat_tool_call>",
    "hermes": r'<tool_call>\s*\{"name": ?"probe_tool"',
    "gemma4": r"<\|tool_call>call:probe_tool",
    "function_gemma": r"<start_function_call>call:probe_tool",
    "minicpm5": r'<function name="probe_tool"',
    "muse_spark": r'<atem:invoke\b[^<>]*name="probe_tool"',
    "lfm2": r"<\|tool_call_start\|>\s*\[probe_tool\(path=",
    "pythonic": r"\[probe_tool\(path=",
    "llama3_json": r'\{"name": ?"probe_tool", ?"parameters": ?\{"path"',
    "xlam": r'\[\s*\{"name": ?"probe_tool", ?"arguments": ?\{"path"',
}

# For templates that render no call, such as SmolLM3's for `tools`.
IN_SOURCE = {
    HARMONY: "<|channel|>",
    "k2_horizon": "<ifm|tool_call>",
    "mirothinker": "<use_mcp_tool>",
    "command_r": "followed by a json-formatted list of actions",
    "deepseek_v4": "｜DSML｜tool_calls",
    "deepseek_v32": "｜DSML｜",
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "llama3_json": "<|python_tag|>",
    "cohere": "<|START_ACTION|>",
    "nemotron_v2": "<TOOLCALL>",
    "apertus": "<|tools_prefix|>",
    "gigachat3": "<|function_call|>",
    "granite": "<|tool_call|>",
    "internlm": "<|action_start|>",
    "seed_oss": "<seed:tool_call>",
    "jamba": "<tool_calls>",
    "olmo3": "<function_calls>",
    "hermes": "<tool_call>",
}

# For vocabularies that have further markers, and for answers with markers of their own.
REASONING_IN_SOURCE = {
    **{
        name: THINKING[name]
        for name in (
            "minimax_m3",
            "hy_v3_opensource",
            "apertus",
            "kimi_vl",
            "openpangu",
            "k2_horizon",
            "plamo3",
        )
    },
    "solar_open": ("<|think|>", "<|content|>"),
    "ernie45": ("</think>", "<response>", "</response>"),
    "hunyuan_a13b": ("</think>", "<answer>", "</answer>"),
}


@attrs.frozen
class OutputFormat:
    """None: not learnt."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    calling: tuple[str, str] | None = None
    """Set for a format that is not streamed."""
    parse: ParseTool | None = attrs.field(default=None, eq=False)
    """As `calling`."""
    unread: bool = False
    """Whether the template writes calls, in a format without a parser."""

    @property
    def thinking(self) -> tuple[str, str] | None:
        return THINKING[self.reasoning_parser] if self.reasoning_parser else None

    @property
    def markers(self) -> frozenset[str]:
        return frozenset(
            (
                *(self.thinking or ()),
                *(self.calling or ()),
                *CALL_MARKERS.get(self.tool_parser or "", ()),
                *ANSWERING.get(self.reasoning_parser or "", ()),
            )
        )


def detect(wrapped: TokenizerWrapper, render: Render, report: TemplateReport) -> OutputFormat:
    text = _rendered_call(render, report)
    tool_parser = next(
        (name for name, pattern in RENDERED.items() if re.search(pattern, text)), None
    ) or _source_format(wrapped)
    reasoning = HARMONY if tool_parser == HARMONY else _reasoning_format(wrapped)
    chosen = of_names(HARMONY if reasoning == HARMONY else tool_parser, reasoning)
    return attrs.evolve(chosen, unread=chosen.tool_parser is None and CALL_MARK in text)


def of_names(tool_parser: str | None, reasoning_parser: str | None) -> OutputFormat:
    if tool_parser not in BUFFERED_TOOL_PARSERS:
        return OutputFormat(tool_parser, reasoning_parser)
    markers = OWN_MARKERS.get(tool_parser) or _markers_of_mlx_lm(tool_parser)
    return OutputFormat(tool_parser, reasoning_parser, markers, PARSERS[tool_parser])


def _markers_of_mlx_lm(tool_parser: str) -> tuple[str, str]:
    module = import_module(f"mlx_lm.tool_parsers.{tool_parser}")
    return str(module.tool_call_start), str(module.tool_call_end or "")


def overridden(detected: OutputFormat, tool_parser: str, reasoning_parser: str) -> OutputFormat:
    tool = TOOL_PARSER_ALIASES.get(tool_parser, tool_parser)
    reasoning = REASONING_PARSER_ALIASES.get(reasoning_parser, reasoning_parser)
    if HARMONY in (tool, reasoning):
        return of_names(HARMONY, HARMONY)
    if detected.tool_parser == HARMONY and (tool, reasoning) != (AUTO, AUTO):
        detected = OutputFormat()  # Harmony is one format for calls and reasoning.
    chosen = of_names(
        {AUTO: detected.tool_parser, NONE: None}.get(tool, tool),
        {AUTO: detected.reasoning_parser, NONE: None}.get(reasoning, reasoning),
    )
    return attrs.evolve(chosen, unread=detected.unread and chosen.tool_parser is None)


def _rendered_call(render: Render, report: TemplateReport) -> str:
    """Empty if the template writes no calls."""
    if report.adaptation.calls == "text":
        return ""
    messages = report.adaptation.adapted(call_conversation())
    return _rendered_or_nothing(render, messages, {"tools": [TOOL]}) or _rendered_or_nothing(
        render, messages, {}
    )


def _rendered_or_nothing(
    render: Render, messages: Sequence[Message], options: Mapping[str, Any]
) -> str:
    try:
        return render(messages, options)
    except Exception:  # noqa: BLE001
        # A template is code of any kind: whatever it raises, it renders no call.
        return ""


def _source_format(wrapped: TokenizerWrapper) -> str | None:
    source = getattr(wrapped, "chat_template", None)
    if isinstance(source, str):
        for name, marker in IN_SOURCE.items():
            if marker in source:
                return name
    settings: Mapping[str, Any] = wrapped.init_kwargs
    named = settings.get("tool_parser_type") or settings.get(NAMED_PARSER)
    parser = TOOL_PARSER_ALIASES.get(named, named) if isinstance(named, str) else None
    return parser if parser in TOOL_PARSERS else None


def _reasoning_format(wrapped: TokenizerWrapper) -> str | None:
    """Name of the reasoning's format: harmony's tokens decide, then the template, then mlx-lm's
    detection, then markers in vocabulary or template. None: no reasoning."""
    vocabulary, source = wrapped.get_vocab(), getattr(wrapped, "chat_template", None)
    if all(marker in vocabulary for marker in ("<|channel|>", "<|message|>", "<|start|>")):
        return HARMONY
    for name, written in REASONING_IN_SOURCE.items():
        if isinstance(source, str) and _all_in(written, source):
            return name
    if wrapped.has_thinking:
        found = (wrapped.think_start, wrapped.think_end)
        return next((name for name, markers in THINKING.items() if markers == found), None)
    for name in ("cohere", "seed_oss", "apriel", "granite", "think", "mistral"):
        markers = THINKING[name]
        are_tokens = all(marker in vocabulary for marker in markers)
        if are_tokens or (isinstance(source, str) and _all_in(markers, source)):
            return name
    return None


def _all_in(markers: Sequence[str], text: str) -> bool:
    return all(marker in text for marker in markers)
