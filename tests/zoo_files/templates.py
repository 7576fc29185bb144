"""Chat templates of our own writing in the forms of the makers': how turns are framed, how calls
are written, and how thinking is switched."""

from __future__ import annotations

import json
from collections.abc import Mapping

import attrs

Frame = tuple[str, str]
BAR = "｜"
ARGUMENTS = "{{ c.function.arguments | tojson }}"
CALL = '{"name": "{{ c.function.name }}", "arguments": ' + ARGUMENTS + "}"


@attrs.frozen
class Turns:
    """Text before and behind a message, by role; a role that is not there is refused."""

    frames: Mapping[str, Frame]
    prompt: str
    """Begin of an answer."""
    end: str
    """The token behind an answer."""
    begin: str = ""
    specials: tuple[str, ...] = ()
    refuses: str = ""
    """Jinja's condition for messages that the makers' template refuses."""


def framed(
    pattern: str, end: str, *, tool: str = "tool", system: str = "system"
) -> dict[str, Frame]:
    roles = {"system": system, "user": "user", "assistant": "assistant", "tool": tool}
    return {role: (pattern.format(name), end) for role, name in roles.items()}


def without(frames: Mapping[str, Frame], *roles: str) -> dict[str, Frame]:
    return {role: frame for role, frame in frames.items() if role not in roles}


NOT_IN_TURN = "(messages | rejectattr('role', 'equalto', 'system') | list | first).role != 'user'"
CHATML = framed("<|im_start|>{}\n", "<|im_end|>\n")
LLAMA3 = framed("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", tool="ipython")
GEMMA = {
    "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
    "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
}
MISTRAL = {
    "system": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "user": ("[INST]", "[/INST]"),
    "assistant": ("", "</s>"),
    "tool": ("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
}
DEEPSEEK = {
    "system": ("", ""),
    "user": (f"<{BAR}User{BAR}>", ""),
    "assistant": (f"<{BAR}Assistant{BAR}>", f"<{BAR}end▁of▁sentence{BAR}>"),
    "tool": (f"<{BAR}tool▁output▁begin{BAR}>", f"<{BAR}tool▁output▁end{BAR}>"),
}
KIMI = framed("<|im_{0}|>{0}<|im_middle|>", "<|im_end|>", tool="system")
GLM = {
    "system": ("<|system|>\n", ""),
    "user": ("<|user|>\n", ""),
    "assistant": ("<|assistant|>\n", ""),
    "tool": ("<|observation|>\n<tool_response>\n", "\n</tool_response>"),
}
GRANITE = framed("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n", tool="tool_response")
COHERE = {
    "system": ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "user": ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "assistant": ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "tool": (
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>",
        "<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>",
    ),
}
HARMONY = {
    "system": ("<|start|>developer<|message|>", "<|end|>"),
    "user": ("<|start|>user<|message|>", "<|end|>"),
    "assistant": ("<|start|>assistant", "<|end|>"),
    "tool": ("<|start|>functions.tool to=assistant<|channel|>commentary<|message|>", "<|end|>"),
}
PHI = framed("<|{}|>\n", "<|end|>\n")
TULU = framed("<|{}|>\n", "\n")
EXAONE = framed("[|{}|]", "[|endofturn|]\n")
GEMMA4 = {
    "system": ("<|turn>system\n", "<turn|>\n"),
    "user": ("<|turn>user\n", "<turn|>\n"),
    "assistant": ("<|turn>model\n", "<turn|>\n"),
    "tool": ("<|turn>tool\n", "<turn|>\n"),
}
SEED = framed("<seed:bos>{}\n", "<seed:eos>")
MINIMAX = framed("]~b]{}\n", "[e~[\n")
APERTUS = {
    role: (f"<|{role}_start|>", f"<|{role}_end|>")
    for role in ("system", "user", "assistant", "tool")
}
HUNYUAN = {
    "system": ("", "<|extra_4|>"),
    "user": ("<|startoftext|>", "<|extra_0|>"),
    "assistant": ("", "<|eos|>"),
    "tool": ("<|startoftext|>", "<|extra_0|>"),
}
NEMOTRON = {
    "system": ("<SPECIAL_10>System\n", "\n"),
    "user": ("<SPECIAL_11>User\n", "\n"),
    "assistant": ("<SPECIAL_11>Assistant\n", "\n<SPECIAL_12>\n"),
    "tool": ("<SPECIAL_11>User\n<TOOL_RESPONSE>[", "]</TOOL_RESPONSE>\n"),
}


def _turns(
    frames: Mapping[str, Frame],
    end: str,
    begin: str = "",
    prompt: str | None = None,
    refuses: str = "",
) -> Turns:
    before = frames["assistant"][0] if prompt is None else prompt
    texts = "".join((begin, end, *(text for frame in frames.values() for text in frame)))
    return Turns(frames, before, end, begin, _markers(texts), refuses)


def _markers(text: str) -> tuple[str, ...]:
    """Texts in brackets of these frames, which are special tokens."""
    import re

    pattern = r"<[^<>\s]+>|\[/?[A-Z_]+\]|\[\|\w+\|\]|\]~b\]|\[e~\["
    return tuple(dict.fromkeys(re.findall(pattern, text)))


TURNS: dict[str, Turns] = {
    "chatml": _turns(CHATML, "<|im_end|>"),
    "chatml, no tools": _turns(without(CHATML, "tool"), "<|im_end|>"),
    "llama3": _turns(LLAMA3, "<|eot_id|>", "<|begin_of_text|>"),
    "gemma": _turns(GEMMA, "<end_of_turn>", "<bos>", refuses="messages[0].role == 'system'"),
    "mistral": _turns(MISTRAL, "</s>", "<s>", refuses=NOT_IN_TURN),
    "mistral, no tools": _turns(without(MISTRAL, "tool", "system"), "</s>", "<s>"),
    "deepseek": _turns(DEEPSEEK, f"<{BAR}end▁of▁sentence{BAR}>", f"<{BAR}begin▁of▁sentence{BAR}>"),
    "kimi": _turns(KIMI, "<|im_end|>"),
    "glm": _turns(GLM, "<|user|>", "[gMASK]<sop>", "<|assistant|>"),
    "granite": _turns(GRANITE, "<|end_of_text|>"),
    "cohere": _turns(COHERE, "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>"),
    "harmony": _turns(HARMONY, "<|return|>"),
    "phi": _turns(without(PHI, "tool"), "<|end|>"),
    "phi with tools": _turns(PHI, "<|end|>"),
    "tulu": _turns(without(TULU, "tool"), "<|endoftext|>", "<|endoftext|>"),
    "exaone": _turns(EXAONE, "[|endofturn|]"),
    "exaone, no tools": _turns(without(EXAONE, "tool"), "[|endofturn|]"),
    "gemma4": _turns(GEMMA4, "<turn|>", "<bos>"),
    "seed": _turns(SEED, "<seed:eos>"),
    "minimax": _turns(MINIMAX, "[e~["),
    "apertus": _turns(APERTUS, "<|assistant_end|>", "<s>"),
    "hunyuan": _turns(HUNYUAN, "<|eos|>"),
    "nemotron": _turns(NEMOTRON, "<SPECIAL_12>", "<s>"),
}


@attrs.frozen
class Calls:
    """Jinja for the calls of a message, each as `c`. `specials`: markers that are tokens."""

    each: str
    before: str = ""
    between: str = ""
    behind: str = ""
    specials: tuple[str, ...] = ()


def _tagged(before: str, behind: str) -> str:
    loop = "{% for k, v in c.function.arguments.items() %}"
    return loop + before + "{{ v }}" + behind + "{% endfor %}"


NAME = "{{ c.function.name }}"
PAIRS = _tagged("<arg_key>{{ k }}</arg_key>\n<arg_value>", "</arg_value>\n")
TAGS = _tagged("<parameter={{ k }}>\n", "\n</parameter>\n")
DSML = _tagged(
    f'<{BAR}DSML{BAR}parameter name="{{{{ k }}}}" string="true">', f"</{BAR}DSML{BAR}parameter>\n"
)
PYTHON = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %}"
CALLS: dict[str, Calls] = {
    "hermes": Calls(f"<tool_call>\n{CALL}\n</tool_call>", specials=("<tool_call>", "</tool_call>")),
    "qwen3_coder": Calls(
        f"<tool_call>\n<function={NAME}>\n{TAGS}</function>\n</tool_call>",
        specials=("<tool_call>", "</tool_call>"),
    ),
    "llama3_json": Calls('{"name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}"),
    "mistral": Calls(f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}", specials=("[TOOL_CALLS]", "[ARGS]")),
    "deepseek_v3": Calls(
        f"<{BAR}tool▁call▁begin{BAR}>{NAME}<{BAR}tool▁sep{BAR}>{ARGUMENTS}<{BAR}tool▁call▁end{BAR}>",
        f"<{BAR}tool▁calls▁begin{BAR}>",
        behind=f"<{BAR}tool▁calls▁end{BAR}>",
        specials=tuple(
            f"<{BAR}{name}{BAR}>"
            for name in (
                "tool▁calls▁begin",
                "tool▁calls▁end",
                "tool▁call▁begin",
                "tool▁call▁end",
                "tool▁sep",
            )
        ),
    ),
    "deepseek_v32": Calls(
        f'<{BAR}DSML{BAR}invoke name="{NAME}">\n{DSML}</{BAR}DSML{BAR}invoke>\n',
        f"<{BAR}DSML{BAR}function_calls>\n",
        behind=f"</{BAR}DSML{BAR}function_calls>",
    ),
    "deepseek_v4": Calls(
        f'<{BAR}DSML{BAR}invoke name="{NAME}">\n{DSML}</{BAR}DSML{BAR}invoke>\n',
        f"<{BAR}DSML{BAR}tool_calls>\n",
        behind=f"</{BAR}DSML{BAR}tool_calls>",
    ),
    "kimi_k2": Calls(
        f"<|tool_call_begin|>functions.{NAME}:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        behind="<|tool_calls_section_end|>",
        specials=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    "glm": Calls(
        f"<tool_call>{NAME}\n{PAIRS}</tool_call>",
        specials=(
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
            *("<arg_value>", "</arg_value>"),
        ),
    ),
    "minimax_m2": Calls(
        f'<invoke name="{NAME}">\n'
        + _tagged('<parameter name="{{ k }}">', "</parameter>\n")
        + "</invoke>\n",
        "<minimax:tool_call>\n",
        behind="</minimax:tool_call>",
        specials=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "harmony": Calls(
        f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|>",
        specials=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"),
    ),
    "gemma4": Calls(
        f"<|tool_call>call:{NAME}{{{{ '{{' }}}}"
        + _tagged('{{ k }}:<|"|>', '<|"|>')
        + "{{ '}' }}<tool_call|>",
        specials=("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
    ),
    "function_gemma": Calls(
        f"<start_function_call>call:{NAME}{{{{ '{{' }}}}"
        + _tagged("{{ k }}:<escape>", "<escape>")
        + "{{ '}' }}<end_function_call>",
        specials=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "cohere": Calls(
        '{"tool_call_id": "0", "tool_name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}",
        "<|START_ACTION|>[",
        ", ",
        "]<|END_ACTION|>",
        ("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "granite": Calls(CALL, "<|tool_call|>[", ", ", "]", ("<|tool_call|>",)),
    "nemotron_v2": Calls(CALL, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "jamba": Calls(CALL, "<tool_calls>[", ", ", "]</tool_calls>"),
    "apertus": Calls(
        '{"' + NAME + '": ' + ARGUMENTS + "}",
        "<|tools_prefix|>[",
        ", ",
        "]<|tools_suffix|>",
        ("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    "gigachat3": Calls(f"<|function_call|>{CALL}", specials=("<|function_call|>",)),
    "seed_oss": Calls(
        f"<seed:tool_call>\n<function={NAME}>\n"
        + _tagged("<parameter={{ k }}>", "</parameter>\n")
        + "</function>\n</seed:tool_call>",
        specials=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    "internlm": Calls(
        f"<|action_start|><|plugin|>\n{CALL}<|action_end|>",
        specials=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    "phi4_mini_json": Calls(CALL, "functools[", ", ", "]"),
    "olmo3": Calls(f"{NAME}({PYTHON})\n", "<function_calls>\n", behind="</function_calls>"),
    "pythonic": Calls(
        f"{NAME}({PYTHON})",
        "<|tool_call_start|>[",
        ", ",
        "]<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "longcat": Calls(
        f"<longcat_tool_call>\n{CALL}\n</longcat_tool_call>",
        specials=("<longcat_tool_call>", "</longcat_tool_call>"),
    ),
}

ON = "{% if enable_thinking is defined and enable_thinking is false %}"
OFF = "{% if enable_thinking is defined and enable_thinking %}"
EMPTY = "<think>\n\n</think>\n\n"
THINKING: dict[str, str] = {
    "": "",
    "on": ON + EMPTY + "{% endif %}",
    "opened": ON + EMPTY + "{% else %}<think>\n{% endif %}",
    "off": OFF + "<think>\n{% else %}" + EMPTY + "{% endif %}",
    "always": "<think>\n",
    "thinking": "{% if thinking is defined and thinking %}<think>{% else %}</think>{% endif %}",
    "thinking on": (
        "{% if thinking is defined and not thinking %}<think></think>{% else %}<think>{% endif %}"
    ),
    "closed": ON + "<think></think>{% endif %}",
    "budget": "{% if thinking_budget == 0 %}<seed:think></seed:think>{% endif %}",
    "cohere": ON + "<|START_THINKING|><|END_THINKING|>{% endif %}",
    "gemma4": OFF + "{% else %}<|channel>thought\n<channel|>{% endif %}",
    "apriel": "Here are my reasoning steps:\n",
    "effort": "",
    "granite": "",
}
"""Text behind the begin of an answer, by the way of switching."""
BEFORE: dict[str, str] = {
    "apriel": "Write your answer behind [BEGIN FINAL RESPONSE].\n",
    "effort": (
        "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    ),
    "granite": (
        "{% if thinking is defined and thinking %}Write your thoughts after 'Here is my thought "
        "process:' and your answer after 'Here is my response:'.{% endif %}"
    ),
}
MARKERS: dict[str, tuple[str, ...]] = {
    "apriel": (),
    "budget": ("<seed:think>", "</seed:think>"),
    "cohere": (
        *("<|START_THINKING|>", "<|END_THINKING|>"),
        *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "gemma4": (),
    "effort": (),
    "granite": (),
    "": (),
}


def literal(text: str) -> str:
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""


def template(turns: Turns, calls: Calls | None, thinking: str) -> str:
    """A whole template."""
    begin, end = turns.frames.get("system", turns.frames["user"])
    pieces = [literal(turns.begin), BEFORE.get(thinking, "")]
    if turns.refuses:
        pieces.append(f"{{% if {turns.refuses} %}}{{{{ raise_exception('roles') }}}}{{% endif %}}")
    if calls is not None:
        pieces.append(
            f"{{% if tools %}}{literal(begin)}{{{{ tools | tojson }}}}{literal(end)}{{% endif %}}"
        )
    pieces.append("{% for m in messages %}")
    for role, (before, behind) in turns.frames.items():
        content = "{{ m.content or '' }}"
        if role == "assistant" and calls is not None:
            between = f"{{% if not loop.last %}}{literal(calls.between)}{{% endif %}}"
            content += (
                "{% if m.tool_calls %}"
                + literal(calls.before)
                + "{% for c in m.tool_calls %}"
                + calls.each
                + between
                + "{% endfor %}"
                + literal(calls.behind)
                + "{% endif %}"
            )
        pieces.append(
            f"{{% if m.role == '{role}' %}}{literal(before)}{content}{literal(behind)}{{% endif %}}"
        )
    roles = ", ".join(f"'{role}'" for role in turns.frames)
    pieces.append(
        f"{{% if m.role not in [{roles}] %}}{{{{ raise_exception('role') }}}}{{% endif %}}"
        "{% endfor %}"
    )
    pieces.append(
        "{% if add_generation_prompt %}"
        + literal(turns.prompt)
        + THINKING[thinking]
        + "{% endif %}"
    )
    return "".join(pieces)


def specials(turns: Turns, calls: Calls | None, thinking: str) -> tuple[str, ...]:
    """Markers that are tokens, each once."""
    own = () if calls is None else calls.specials
    markers = MARKERS.get(thinking, ("<think>", "</think>"))
    return tuple(dict.fromkeys((*turns.specials, turns.end, *own, *markers)))
