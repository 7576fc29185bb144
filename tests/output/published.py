"""Families as they are published: how a chat template writes a call, and which markers are special
tokens. The templates are of our own writing."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tests.families import save_tokenizer, write_json

BAR = "｜"
CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'


def marked(token: str) -> str:
    """Write every argument in a tag `parameter`."""
    return (
        f'{{% for k, v in c.function.arguments | items %}}<{token}parameter name="{{{{ k }}}}">'
        f"{{{{ v }}}}</{token}parameter>{{% endfor %}}"
    )


PARAMETERS = marked("")
ITEMS = "{% for k, v in c.function.arguments | items %}"
HY = (
    "{# <thinkSUFFIX> </thinkSUFFIX> #}<tool_callsSUFFIX>\n<tool_callSUFFIX>{{ c.function.name }}"
    "<tool_sepSUFFIX>\n{% for k, v in c.function.arguments | items %}<arg_keySUFFIX>{{ k }}"
    "</arg_keySUFFIX>\n<arg_valueSUFFIX>{{ v }}</arg_valueSUFFIX>\n{% endfor %}</tool_callSUFFIX>\n"
    "</tool_callsSUFFIX>"
)
FAMILIES: dict[str, tuple[str, tuple[str, ...], str | None, str | None]] = {
    "Command A": (
        (
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ c.function.name }}", '
            '"parameters": {{ c.function.arguments | tojson }}}]<|END_ACTION|>'
        ),
        (
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
        ),
        "cohere",
        "cohere",
    ),
    "DeepSeek V4": (
        (
            f'<{BAR}DSML{BAR}tool_calls>\n<{BAR}DSML{BAR}invoke name="{{{{ c.function.name }}}}">'
            f"</{BAR}DSML{BAR}invoke></{BAR}DSML{BAR}tool_calls>"
        ),
        (),
        "deepseek_v4",
        None,
    ),
    "Gemma 4": (
        "<|tool_call>call:{{ c.function.name }}{}<tool_call|>",
        ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
        "gemma4",
        "gemma4",
    ),
    "Granite 3.3": (f"<|tool_call|>[{CALL}]", ("<|tool_call|>",), "granite", None),
    "Command R": (
        (
            'Action: ```json\n[{"tool_name": "{{ c.function.name }}", "parameters": '
            "{{ c.function.arguments | tojson }}}]```"
        ),
        (),
        "command_r",
        None,
    ),
    "CWM": (
        (
            "{# <think> </think> #}<tool: {{ c.function.name }}>\n{{ c.function.arguments.path }}\n"
            "</tool>"
        ),
        (),
        "cwm",
        "think",
    ),
    "IQuest Coder 2": (
        "<iquestcoder_tool_call>{{ c.function.name }}"
        + ITEMS
        + "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}"
        "</iquestcoder_tool_call>",
        ("<iquestcoder_tool_call>", "</iquestcoder_tool_call>"),
        "iquest_coder_v2",
        None,
    ),
    "K2 Horizon": (
        "{# <ifm|think> </ifm|think> #}<ifm|tool_calls>\n<ifm|tool_call>{{ c.function.name }}\n"
        + ITEMS
        + "<ifm|arg_key>{{ k }}</ifm|arg_key><ifm|arg_value>{{ v }}</ifm|arg_value>{% endfor %}"
        "</ifm|tool_call>\n</ifm|tool_calls>",
        ("<ifm|tool_calls>", "<ifm|tool_call>", "</ifm|tool_call>", "</ifm|tool_calls>"),
        "k2_horizon",
        "k2_horizon",
    ),
    "MiroThinker": (
        (
            "{# <think> </think> #}<use_mcp_tool>\n<server_name>tools</server_name>\n<tool_name>"
            "{{ c.function.name }}</tool_name>\n<arguments>\n{{ c.function.arguments | tojson }}\n"
            "</arguments>\n</use_mcp_tool>"
        ),
        ("<think>", "</think>"),
        "mirothinker",
        "think",
    ),
    "PLaMo 3": (
        (
            "{# <|plamo:begin_think:plamo|> <|plamo:end_think:plamo|> #}"
            "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
            "<|plamo:begin_tool_name:plamo|>{{ c.function.name }}<|plamo:end_tool_name:plamo|>"
            "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
            "{{ c.function.arguments | tojson }}<|plamo:end_tool_arguments:plamo|>"
            "<|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>"
        ),
        ("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>"),
        "plamo3",
        "plamo3",
    ),
    "RWKV 7": (f"**Tool Call:**\n\n```json\n{CALL}\n```", (), "rwkv", None),
    "Nemotron Nano 2": (f"<TOOLCALL>[{CALL}]</TOOLCALL>", (), "nemotron_v2", None),
    "Apertus": (
        (
            '<|tools_prefix|>[{"{{ c.function.name }}": {{ c.function.arguments | tojson }}}]'
            "<|tools_suffix|>"
        ),
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        "apertus",
        None,
    ),
    "Apriel 1.6": (
        f"Here are my reasoning steps: [BEGIN FINAL RESPONSE]<tool_calls>[{CALL}]</tool_calls>",
        (),
        "jamba",
        "apriel",
    ),
    "GigaChat 3.1": (f"<|function_call|>{CALL}", ("<|function_call|>",), "gigachat3", None),
    "Seed-OSS": (
        (
            "<seed:think></seed:think><seed:tool_call>\n<function={{ c.function.name }}></function>"
            "</seed:tool_call>"
        ),
        ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        "seed_oss",
        "seed_oss",
    ),
    "InternLM": (
        f"<|action_start|><|plugin|>\n{CALL}<|action_end|>",
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        "internlm",
        None,
    ),
    "Phi-4-mini": (f"functools[{CALL}]", (), "phi4_mini_json", None),
    "Olmo 3": ("<function_calls>\n{{ c.function.name }}()\n</function_calls>", (), "olmo3", None),
    "Functionary 3.1": (
        "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>",
        (),
        "functionary_v31",
        None,
    ),
    "Functionary 3.2": (
        ">>>{{ c.function.name }}\n{{ '' + c.function.arguments }}",
        (),
        "functionary_v32",
        None,
    ),
    "Step 3": (
        (
            f"<{BAR}tool_calls_begin{BAR}>\n<{BAR}tool_call_begin{BAR}>function<{BAR}tool_sep{BAR}>"
            '<steptml:invoke name="{{ c.function.name }}">'
            + ITEMS
            + '<steptml:parameter name="{{ k }}">{{ v }}</steptml:parameter>{% endfor %}'
            f"</steptml:invoke><{BAR}tool_call_end{BAR}>\n<{BAR}tool_calls_end{BAR}>"
        ),
        (
            f"<{BAR}tool_calls_begin{BAR}>",
            f"<{BAR}tool_call_begin{BAR}>",
            f"<{BAR}tool_sep{BAR}>",
            f"<{BAR}tool_call_end{BAR}>",
            f"<{BAR}tool_calls_end{BAR}>",
            "<think>",
            "</think>",
        ),
        "step3",
        "think",
    ),
    "Hunyuan 7B": (
        (
            "{# </think> <answer> </answer> #}<tool_calls>\n<tool_call>{{ c.function.name }}\n"
            "```json\n{{ c.function.arguments | tojson }}\n```</tool_call>\n</tool_calls>"
        ),
        ("<tool_calls>", "<tool_call>", "</tool_call>", "</tool_calls>", "<answer>", "</answer>"),
        "hunyuan",
        "hunyuan_a13b",
    ),
    "Hunyuan A13B": (
        f"{{# </think> <answer> </answer> #}}<tool_calls>[{CALL}]</tool_calls>",
        (),
        "jamba",
        "hunyuan_a13b",
    ),
    "Hy3": (HY.replace("SUFFIX", ""), (), "hy_v3", "think"),
    "Hy3, as released": (
        HY.replace("SUFFIX", ":opensource"),
        (
            "<tool_calls:opensource>",
            "<tool_sep:opensource>",
            "</arg_value:opensource>",
            "<think:opensource>",
            "</think:opensource>",
        ),
        "hy_v3_opensource",
        "hy_v3_opensource",
    ),
    "MiniMax M1": (
        f"<tool_calls>\n{CALL}\n</tool_calls>",
        ("<think>", "</think>"),
        "jamba",
        "think",
    ),
    "MiniMax M2": (
        (
            f'<minimax:tool_call>\n<invoke name="{{{{ c.function.name }}}}">{PARAMETERS}</invoke>\n'
            "</minimax:tool_call>"
        ),
        ("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
        "minimax_m2",
        "think",
    ),
    "MiniMax M3": (
        (
            "{# <mm:think> </mm:think> #}{% set n = ']<]minimax[>[' %}{{ n }}<tool_call>\n{{ n }}"
            '<invoke name="{{ c.function.name }}">{% for k, v in c.function.arguments | items %}'
            "{{ n }}<{{ k }}>{{ v }}{{ n }}</{{ k }}>{% endfor %}{{ n }}</invoke>\n{{ n }}"
            "</tool_call>"
        ),
        ("]<]minimax[>[", "<tool_call>", "</tool_call>", "<mm:think>", "</mm:think>"),
        "minimax_m3",
        "minimax_m3",
    ),
    "dots": (
        (
            f'<dots_function_call>\n<invoke name="{{{{ c.function.name }}}}">{PARAMETERS}'
            "</invoke>\n</dots_function_call>"
        ),
        (),
        "dots",
        None,
    ),
    "DeepSeek V3.1": (
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
            "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<think>", "</think>"),
        "deepseek_v3",
        "think",
    ),
    "DeepSeek V4.1": (
        (
            f'<{BAR}DSML{BAR} calls>\n<{BAR}DSML{BAR} invoke name="{{{{ c.function.name }}}}">\n'
            f"{marked(f'{BAR}DSML{BAR} ')}</{BAR}DSML{BAR} invoke>\n</{BAR}DSML{BAR} calls>"
        ),
        (f"{BAR}DSML{BAR}", "<think>", "</think>"),
        "deepseek_v41",
        "think",
    ),
    "GigaChat 3.5": (
        (
            f'<{BAR}GCML{BAR}tool_calls><{BAR}GCML{BAR}invoke name="{{{{ c.function.name }}}}">'
            f"{marked(f'{BAR}GCML{BAR}')}</{BAR}GCML{BAR}invoke></{BAR}GCML{BAR}tool_calls>"
        ),
        (f"{BAR}GCML{BAR}",),
        "gigachat35",
        None,
    ),
    "Solar Open": (
        (
            "<|think|><|content|><|tool_calls|><|tool_call:begin|>{{ c.id }}<|tool_call:name|>"
            "{{ c.function.name }}<|tool_call:args|>{{ c.function.arguments | tojson }}"
            "<|tool_call:end|>"
        ),
        (
            "<|think|>",
            "<|content|>",
            "<|begin|>",
            "<|end|>",
            "<|tool_calls|>",
            "<|tool_call:name|>",
        ),
        "solar_open",
        "solar_open",
    ),
    "Solar Open 2": (
        (
            "<|tool_call:start|>{{ c.function.name }}\n"
            + ITEMS
            + "<|tool_arg:start|>{{ k }}<|tool_arg:value|>{{ v }}<|tool_arg:end|>\n{% endfor %}"
            "<|tool_call:end|>"
        ),
        ("<|tool_call:start|>", "<|tool_arg:value|>", "<|think:start|>", "<|think:end|>"),
        "solar_open2",
        "laguna",
    ),
    "openPangu": (
        f"[unused16][unused17][unused11][{CALL}][unused12]",
        ("[unused11]", "[unused12]", "[unused16]", "[unused17]"),
        "openpangu",
        "openpangu",
    ),
    "ERNIE 4.5": (
        f"{{# </think> <response> </response> #}}\n<tool_call>\n{CALL}\n</tool_call>",
        ("<think>", "</think>", "<response>", "</response>"),
        "hermes",
        "ernie45",
    ),
    "Nemotron Mini": (f"<toolcall> {CALL} </toolcall>", (), "nemotron_mini", None),
    "xLAM 2": (f"[{CALL}]", (), "xlam", None),
    "Llama 4": (
        (
            "<|python_start|>[{{ c.function.name }}(path={{ c.function.arguments.path | tojson }})]"
            "<|python_end|>"
        ),
        ("<|python_start|>", "<|python_end|>"),
        "pythonic",
        None,
    ),
    "LFM2": (
        (
            "<|tool_call_start|>[{{ c.function.name }}(path="
            "{{ c.function.arguments.path | tojson }})]<|tool_call_end|>"
        ),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        "lfm2",
        None,
    ),
    "Kimi K2.5": (
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ c.function.name }}:0"
            "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>"
            "<|tool_calls_section_end|>"
        ),
        ("<|tool_call_begin|>", "<|tool_calls_section_end|>", "<think>", "</think>"),
        "kimi_k2",
        "think",
    ),
    "Qwen3": (
        f"<tool_call>\n{CALL}\n</tool_call>",
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        "hermes",
        "think",
    ),
    "Step 3.5, Nemotron 3": (
        (
            "<tool_call>\n<function={{ c.function.name }}>\n<parameter=path>\n"
            "{{ c.function.arguments.path }}\n</parameter>\n</function>\n</tool_call>"
        ),
        ("<tool_call>", "</tool_call>", "<function=", "</function>", "<think>", "</think>"),
        "qwen3_coder",
        "think",
    ),
    "Mistral Small 3.2": (
        (
            "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
            "{{ c.function.arguments | tojson }}"
        ),
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
        "mistral",
        "mistral",
    ),
}
"""How a template writes a call, its special tokens, and the formats of calls and reasoning."""


def save_family(directory: Path, call: str, specials: tuple[str, ...]) -> None:
    save_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: "
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        + call
        + "{% endfor %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    config = json.loads((directory / "tokenizer_config.json").read_text())
    write_json(directory / "tokenizer_config.json", config | {"chat_template": template})
