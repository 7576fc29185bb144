"""Names of output formats, by which families of models write tool calls and reasoning."""

# As in `--tool-parser` and `--reasoning-parser`; vLLM's and mlx-lm's names are aliases.

from __future__ import annotations

from trouper.protocol.problems import SettingsInvalid

AUTO, NONE = "auto", "none"
HARMONY = "harmony"
# Formats whose arguments are streamed while generated.
STREAMED_TOOL_PARSERS = (
    "cohere",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "gigachat3",
    "glm",
    "granite",
    "granite_20b_fc",
    HARMONY,
    "hermes",
    "internlm",
    "jamba",
    "kimi_k2",
    "laguna",
    "llama3_json",
    "longcat",
    "minimax_m2",
    "mistral",
    "nemotron_v2",
    "phi4_mini_json",
    "qwen3_coder",
    "seed_oss",
)
# Formats that are read once a call is complete.
BUFFERED_TOOL_PARSERS = (
    "apertus",
    "function_gemma",
    "gemma4",
    "kimi_k3",
    "minicpm5",
    "muse_spark",
    "olmo3",
    "pythonic",
)
# Markers around calls of buffered formats that mlx-lm lacks.
OWN_MARKERS = {
    "apertus": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "olmo3": ("<function_calls>", "</function_calls>"),
}
TOOL_PARSER_ALIASES = {
    "apriel": "jamba",
    "cohere_command": "cohere",
    "cohere_command3": "cohere",
    "command_a": "cohere",
    "ernie45": "hermes",
    "exaone4": "hermes",
    "hunyuan_a13b": "jamba",
    "minimax_m1": "jamba",
    "mimo": "qwen3_coder",
    "nemotron_json": "nemotron_v2",
    "smollm3": "hermes",
    "step3p5": "qwen3_coder",
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
# Markers around reasoning, by format.
THINKING = {
    "think": ("<think>", "</think>"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
    "laguna": ("<|think:start|>", "<|think:end|>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "apriel": ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "hunyuan_a13b": ("<think>", "</think>"),
    HARMONY: ("<|channel|>analysis<|message|>", "<|end|>"),
}
# Markers around the answer behind reasoning, part of no text.
ANSWERING = {
    "apriel": ("[END FINAL RESPONSE]",),
    "cohere": ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    "hunyuan_a13b": ("<answer>", "</answer>"),
}
REASONING_PARSER_ALIASES = {
    **dict.fromkeys(
        (
            "deepseek_r1",
            "deepseek_v3",
            "ernie45",
            "exaone4",
            "glm45",
            "kimi_k2",
            "minimax_m2",
            "nemotron",
            "olmo3",
            "qwen3",
            "smollm3",
            "step3",
        ),
        "think",
    ),
    "cohere_command": "cohere",
    "command_a": "cohere",
    "gpt_oss": HARMONY,
    "openai": HARMONY,
    "openai_gptoss": HARMONY,
}
# Texts in calls that may be special tokens, made visible for the parsers.
CALL_MARKERS = {
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "function_gemma": ("<escape>",),
    "gemma4": ('<|"|>',),
    "gigachat3": ("<|function_call|>",),
    "granite": ("<|tool_call|>", "<|/tool_call|>"),
    "granite_20b_fc": ("<function_call>",),
    "internlm": ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "nemotron_v2": ("<TOOLCALL>", "</TOOLCALL>"),
    "phi4_mini_json": ("functools",),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": ("｜DSML｜",),
    "deepseek_v4": ("｜DSML｜",),
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
TOOL_PARSERS = (
    AUTO,
    NONE,
    *sorted((*STREAMED_TOOL_PARSERS, *BUFFERED_TOOL_PARSERS, *TOOL_PARSER_ALIASES)),
)
REASONING_PARSERS = (AUTO, NONE, *sorted({*THINKING, *REASONING_PARSER_ALIASES}))


def require_together(tool_parser: str, reasoning_parser: str) -> None:
    """Raises `SettingsInvalid` if only one of both is harmony, which is one format for both."""
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
