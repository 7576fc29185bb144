"""Formats as families publish them: what their templates make of an earlier call says which parser
reads them, also where all markers are special tokens; answers are cut at random."""

from __future__ import annotations

from pathlib import Path
from random import Random

import attrs
import pytest

from tests.output.published import FAMILIES, save_family
from tests.output.samples import FormatTokenizer, joined, pieces_of
from trouper.engine.loading.output_format_detection import of_names
from trouper.engine.loading.tokenizer import load
from trouper.protocol.output_formats import ANSWERING, THINKING
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.tool_calls import Tools
from trouper.web.serving.tool_support import why_not


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_known_by_what_its_template_writes(family: str, tmp_path: Path) -> None:
    call, specials, tool_parser, reasoning_parser = FAMILIES[family]
    save_family(tmp_path, call, specials)
    tokenizer = load(tmp_path)
    assert (tokenizer.tool_parser, tokenizer.reasoning_parser) == (tool_parser, reasoning_parser)
    for text in specials:  # Special tokens are no text, but parsers need these.
        assert tokenizer.token_bytes(tokenizer.vocabulary[text]) == text.encode()


def test_calls_without_a_parser_are_named_as_what_they_are(tmp_path: Path) -> None:
    """A model that writes calls was trained to."""
    call = "<new_call>{{ c.function.arguments | tojson }}"
    save_family(tmp_path, call, ())
    tokenizer = load(tmp_path)
    assert tokenizer.tool_parser is None and tokenizer.unread_calls
    assert "in a format that has no parser here" in why_not("it", tokenizer)
    assert load(tmp_path, tool_parser="hermes").unread_calls is False
    save_family(tmp_path, "", ())
    tokenizer = load(tmp_path)
    assert not tokenizer.unread_calls
    assert why_not("it", tokenizer) == "it was not trained to call tools"


@pytest.mark.parametrize("text", ["Use <answer>.", "In <response> x</response> is text."])
def test_an_answer_may_mention_markers_of_answers(text: str) -> None:
    for name in ("hunyuan_a13b", "ernie45"):
        start, end = ANSWERING[name]
        tokenizer = FormatTokenizer(None, name, THINKING[name])
        written = f"<think>\nhm\n</think>\n{start}\n{text}\n{end}\n"
        for pieces in ([written], [*written]):
            reading = OutputParser(Tools(()), tokenizer, thinks=False)
            deltas = [delta for piece in pieces for delta in reading.push(piece)]
            assert dict(joined(deltas + reading.end()))["Content"].strip() == text


ANSWERS = {
    "cohere": (
        "<|START_THINKING|>I look.<|END_THINKING|><|START_RESPONSE|>Hello!<|END_RESPONSE|>",
        "I look.",
    ),
    "k2_horizon": ("<ifm|think>I look.</ifm|think>Hello!", "I look."),
    "plamo3": ("<|plamo:begin_think:plamo|>I look.<|plamo:end_think:plamo|>Hello!", "I look."),
    "gemma4": ("<|channel>thought\nI look.\n<channel|>Hello!", "I look."),
    "granite": ("Here is my thought process: I look. Here is my response: Hello!", " I look."),
    "seed_oss": ("<seed:think>I look.</seed:think>Hello!", "I look."),
    "hunyuan_a13b": ("<think>\nI look.\n</think>\n<answer>\nHello!\n</answer>", "I look."),
    "ernie45": ("<think>\nI look.\n</think>\n\n<response>\nHello!\n</response>\n", "I look."),
    "solar_open": (
        "<|think|>I look.<|end|><|begin|>assistant<|content|>Hello!<|end|>",
        "I look.",
    ),
    "kimi_k3": (
        (
            "<|open|>think<|sep|>I look.<|close|>think<|sep|><|open|>response<|sep|>Hello!"
            "<|close|>response<|sep|><|close|>message<|sep|>"
        ),
        "I look.",
    ),
    "minimax_m3": ("<mm:think>I look.</mm:think>\n\nHello!", "I look."),
    "kimi_vl": ("◁think▷I look.◁/think▷Hello!", "I look."),
    "apertus": ("<|inner_prefix|>I look.<|inner_suffix|>Hello!", "I look."),
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
