"""Formats as families publish them: what their templates make of an earlier call says which parser
reads them, also where all markers are special tokens; answers are cut at random."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import attrs
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.families import save_tokenizer, write_json
from tests.output.samples import FormatTokenizer, joined, pieces_of
from trouper.engine.loading.output_format_detection import of_names
from trouper.engine.loading.tokenizer import load
from trouper.protocol.output_formats import ANSWERING, THINKING
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.tool_calls import Tools

BAR = "｜"
CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_known_by_what_its_template_writes(family: str, tmp_path: Path) -> None:
    call, specials, tool_parser, reasoning_parser = FAMILIES[family]
    save_family(tmp_path, call, specials)
    tokenizer = load(tmp_path)
    assert (tokenizer.tool_parser, tokenizer.reasoning_parser) == (tool_parser, reasoning_parser)
    for text in specials:  # Special tokens are no text, but parsers need these.
        assert tokenizer.token_bytes(tokenizer.vocabulary[text]) == text.encode()


ANSWERS = {
    "cohere": (
        "<|START_THINKING|>I look.<|END_THINKING|><|START_RESPONSE|>Hello!<|END_RESPONSE|>",
        "I look.",
    ),
    "gemma4": ("<|channel>thought\nI look.\n<channel|>Hello!", "I look."),
    "granite": ("Here is my thought process: I look. Here is my response: Hello!", " I look."),
    "seed_oss": ("<seed:think>I look.</seed:think>Hello!", "I look."),
    "hunyuan_a13b": ("<think>\nI look.\n</think>\n<answer>\nHello!\n</answer>", "I look."),
    "apriel": (
        (
            "Here are my reasoning steps:\nI look.\n[BEGIN FINAL RESPONSE]\nHello!\n"
            "[END FINAL RESPONSE]"
        ),
        "I look.",
    ),
}
"""An answer of each format of reasoning, and its reasoning. The content is "Hello!"."""


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("seed", range(6))
def test_reasoning_is_no_part_of_the_answer(name: str, seed: int) -> None:
    text, reasoning = ANSWERS[name]
    tokenizer = FormatTokenizer(None, name, THINKING[name])
    reading = OutputParser(Tools(()), tokenizer, thinks=False)
    pieces = [text] if not seed else pieces_of(text, Random(seed))
    pieces_read = joined(
        [delta for piece in pieces for delta in reading.push(piece)] + reading.end()
    )
    kinds = dict(pieces_read)
    assert [kind for kind, _ in pieces_read] == ["Reasoning", "Content"]
    assert (kinds["Reasoning"], kinds["Content"].strip()) == (reasoning, "Hello!")


def test_markers_around_answers_are_of_known_formats() -> None:
    assert set(ANSWERING) <= set(THINKING)
    assert attrs.asdict(of_names("cohere", "cohere"))["reasoning_parser"] == "cohere"
