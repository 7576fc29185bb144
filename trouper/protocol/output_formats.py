"""Names of output formats: how families of models write calls of tools and reasoning into their
answers.

The names are those of `--tool-parser` and `--reasoning-parser`; names that vLLM and mlx-lm use for
the same formats are understood, too.
"""

from __future__ import annotations

from trouper.protocol.problems import SettingsInvalid

AUTO, NONE = "auto", "none"
HARMONY = "harmony"
STREAMED_TOOL_PARSERS = (
    "deepseek_v3",
    "deepseek_v32",
    "glm",
    HARMONY,
    "hermes",
    "kimi_k2",
    "laguna",
    "llama3_json",
    "longcat",
    "minimax_m2",
    "mistral",
    "qwen3_coder",
)
"""Formats whose arguments are streamed while they are generated."""
BUFFERED_TOOL_PARSERS = (
    "function_gemma",
    "gemma4",
    "kimi_k3",
    "minicpm5",
    "muse_spark",
    "pythonic",
)
"""Formats that are read once a call is complete."""
TOOL_PARSER_ALIASES = {
    "deepseek_v31": "deepseek_v3",
    "glm45": "glm",
    "glm47": "glm",
    "gpt_oss": HARMONY,
    "json_tools": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "openai": HARMONY,
    "qwen3_xml": "qwen3_coder",
}
THINKING = {
    "think": ("<think>", "</think>"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
    "laguna": ("<|think:start|>", "<|think:end|>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    HARMONY: ("<|channel|>analysis<|message|>", "<|end|>"),
}
"""Markers around reasoning, by format."""
REASONING_PARSER_ALIASES = {
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "qwen3"), "think"
    ),
    "gpt_oss": HARMONY,
    "openai": HARMONY,
    "openai_gptoss": HARMONY,
}
CALL_MARKERS = {
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": ("｜DSML｜",),
    "glm": (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    HARMONY: (
        "<|start|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ),
    "hermes": ("<tool_call>", "</tool_call>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "laguna": (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    "llama3_json": ("<|python_tag|>",),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
}
"""Markers of streamed formats that may be special tokens, which are then visible text for their
parsers."""
TOOL_PARSERS = (
    AUTO,
    NONE,
    *sorted((*STREAMED_TOOL_PARSERS, *BUFFERED_TOOL_PARSERS, *TOOL_PARSER_ALIASES)),
)
REASONING_PARSERS = (AUTO, NONE, *sorted({*THINKING, *REASONING_PARSER_ALIASES}))


def require_together(tool_parser: str, reasoning_parser: str) -> None:
    """Raises `SettingsInvalid` if one is harmony and the other is not: it is one format for
    both."""
    named = {
        TOOL_PARSER_ALIASES.get(tool_parser, tool_parser),
        REASONING_PARSER_ALIASES.get(reasoning_parser, reasoning_parser),
    }
    if HARMONY in named and named - {HARMONY, AUTO}:
        flags = f"--tool-parser {tool_parser} and --reasoning-parser {reasoning_parser}"
        raise SettingsInvalid(
            f"{flags}: harmony is one format for calls and reasoning; name it for both",
            "--tool-parser",
        )
