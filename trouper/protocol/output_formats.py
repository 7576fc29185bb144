"""Names of output formats, by which families of models write tool calls and reasoning."""

# As in `--tool-parser` and `--reasoning-parser`; vLLM's and mlx-lm's names are aliases.

from __future__ import annotations

from trouper.protocol.problems import SettingsInvalid

AUTO, NONE = "auto", "none"
HARMONY = "harmony"
FUNCTIONARY_32 = "functionary_v32"
# Formats that are read once a call is complete. Of all others arguments are streamed.
BUFFERED_TOOL_PARSERS = (
    "apertus",
    "cwm",
    "function_gemma",
    "gemma4",
    "kimi_k3",
    "lfm2",
    "minicpm5",
    "minimax_m3",
    "muse_spark",
    "olmo3",
    "pythonic",
)
# Markers around calls of buffered formats that mlx-lm lacks, or has by another name.
OWN_MARKERS = {
    "apertus": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "cwm": ("<tool:", "</tool>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "minimax_m3": ("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
    "olmo3": ("<function_calls>", "</function_calls>"),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
}
TOOL_PARSER_ALIASES = {
    "apertus2509": "apertus",
    "apriel": "jamba",
    "cohere_command": "cohere",
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "command_a": "cohere",
    "deepseek_v31": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v3",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "ernie45": "hermes",
    "exaone4": "hermes",
    "firefunction": "phi4_mini_json",
    "functiongemma": "function_gemma",
    "glm45": "glm",
    "glm47": "glm",
    "gpt-oss": HARMONY,
    "gpt_oss": HARMONY,
    "granite-20b-fc": "granite_20b_fc",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "interns1": "internlm",
    "json_tools": "hermes",
    "ling3": "glm",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3_coder",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "minimax_m1": "jamba",
    "muse": "muse_spark",
    "nemotron_json": "nemotron_v2",
    "openai": HARMONY,
    "pangu": "openpangu",
    "poolside_v1": "laguna",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "smollm3": "hermes",
    "spark25": "glm",
    "step3p5": "qwen3_coder",
    "trinity": "hermes",
}
# Markers around reasoning, by format.
THINKING = {
    "think": ("<think>", "</think>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "ernie45": ("<think>", "</think>"),
    "hy_v3_opensource": ("<think:opensource>", "</think:opensource>"),
    "k2_horizon": ("<ifm|think>", "</ifm|think>"),
    "kimi_vl": ("◁think▷", "◁/think▷"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "openpangu": ("[unused16]", "[unused17]"),
    "plamo3": ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "solar_open": ("<|think|>", "<|end|>"),
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
    "ernie45": ("<response>", "</response>"),
    "hunyuan_a13b": ("<answer>", "</answer>"),
    "kimi_k3": (
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
    ),
    "solar_open": ("<|begin|>assistant", "<|content|>", "<|end|>"),
}
REASONING_PARSER_ALIASES = {
    **dict.fromkeys(
        (
            "deepseek-r1",
            "deepseek-v3",
            "deepseek-v4",
            "deepseek_r1",
            "deepseek_v3",
            "deepseek_v4",
            "exaone4",
            "glm45",
            "glm47",
            "holo2",
            "hy_v3",
            "interns1",
            "kimi_k2",
            "mimo",
            "minimax",
            "minimax_m2",
            "nemotron",
            "nemotron_3",
            "nemotron_v3",
            "olmo3",
            "poolside_v1",
            "qwen3",
            "smollm3",
            "step3",
            "step3p5",
            "telechat4",
        ),
        "think",
    ),
    "apertus2509": "apertus",
    "cohere_command": "cohere",
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "command_a": "cohere",
    "gpt-oss": HARMONY,
    "kimi": "kimi_vl",
    "minimax-m3": "minimax_m3",
    "pangu": "openpangu",
    "solar_open2": "laguna",
    "gpt_oss": HARMONY,
    "openai": HARMONY,
    "openai_gptoss": HARMONY,
}
ARGUMENTS = (
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
FUNCTIONS = ("<function=", "</function>", "<parameter=", "</parameter>")
INVOKES = ("<invoke name=", "</invoke>", "<parameter name=", "</parameter>")


def _hy_markers(suffix: str) -> tuple[str, ...]:
    names = ("tool_calls", "tool_call", "arg_key", "arg_value")
    ends = [f"<{slash}{name}{suffix}>" for name in names for slash in ("", "/")]
    return *ends, f"<tool_sep{suffix}>"


# Texts in calls that may be special tokens, made visible for the parsers; of every format whose
# arguments are streamed, and of others that have some.
CALL_MARKERS = {
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "command_r": (),
    "dots": ("<dots_function_call>", "</dots_function_call>", *INVOKES),
    "function_gemma": ("<escape>",),
    "functionary_v31": ("<function=", "</function>"),
    FUNCTIONARY_32: (">>>",),
    "gemma4": ('<|"|>',),
    "gigachat3": ("<|function_call|>",),
    "gigachat35": ("｜GCML｜",),
    "granite": ("<|tool_call|>", "<|/tool_call|>"),
    "granite_20b_fc": ("<function_call>",),
    "internlm": ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    "hunyuan": ("<tool_calls>", "<tool_call>", "</tool_call>", "</tool_calls>"),
    "hy_v3": _hy_markers(""),
    "hy_v3_opensource": _hy_markers(":opensource"),
    "iquest_coder_v2": (
        "<iquestcoder_tool_call>",
        "</iquestcoder_tool_call>",
        *ARGUMENTS[2:],
    ),
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "k2_horizon": tuple(
        f"<{slash}ifm|{name}>"
        for name in ("tool_calls", "tool_call", "arg_key", "arg_type", "arg_value")
        for slash in ("", "/")
    ),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "minicpm5": ("<param name=", "</param>"),
    "minimax_m3": INVOKES[:2],
    "mirothinker": (
        *("<use_mcp_tool>", "</use_mcp_tool>", "<server_name>", "</server_name>"),
        *("<tool_name>", "</tool_name>", "<arguments>", "</arguments>"),
    ),
    "muse_spark": ("<atem:invoke", "</atem:invoke>", "<atem:parameter", "</atem:parameter>"),
    "nemotron_mini": ("<toolcall>", "</toolcall>"),
    "nemotron_v2": ("<TOOLCALL>", "</TOOLCALL>"),
    "openpangu": ("[unused11]", "[unused12]"),
    "phi4_mini_json": ("functools",),
    "plamo3": (
        "<|plamo:begin_",
        "<|plamo:end_",
        ":plamo|>",
        "<|plamo:constrain|>",
        "<|plamo:msg|>",
    ),
    "pythonic": OWN_MARKERS["lfm2"],
    "rwkv": (),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>", *FUNCTIONS),
    "solar_open": (
        "<|tool_calls|>",
        "<|tool_call:begin|>",
        "<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
    ),
    "solar_open2": (
        "<|tool_call:start|>",
        "<|tool_arg:start|>",
        "<|tool_arg:value|>",
        "<|tool_arg:end|>",
        "<|tool_call:end|>",
    ),
    "step3": (
        "<｜tool_calls_begin｜>",
        "<｜tool_call_begin｜>",
        "<｜tool_sep｜>",
        "<steptml:invoke name=",
        "</steptml:invoke>",
        "<steptml:parameter name=",
        "</steptml:parameter>",
        "<｜tool_call_end｜>",
        "<｜tool_calls_end｜>",
    ),
    "xlam": (),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": ("｜DSML｜",),
    "deepseek_v4": ("｜DSML｜",),
    "deepseek_v41": ("｜DSML｜",),
    "glm": ARGUMENTS,
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
    "laguna": ARGUMENTS,
    "llama3_json": ("<|python_tag|>",),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>", *INVOKES),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "qwen3_coder": ("<tool_call>", "</tool_call>", *FUNCTIONS),
}
TOOL_PARSERS = (
    AUTO,
    NONE,
    *sorted({*CALL_MARKERS, *BUFFERED_TOOL_PARSERS, *TOOL_PARSER_ALIASES}),
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
