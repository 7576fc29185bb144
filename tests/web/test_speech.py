"""Taking an answer apart: whole or in any pieces it comes out the same."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import ByteTokenizer
from trouper.web.openai.tools import Tools
from trouper.web.openai.voice import Voice, thinks_already
from trouper.web.speech import Markers, Part, Speech

MARKERS = Markers(("<think>", "</think>"), ("<call>", "</call>"))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '{"name": "f", "arguments": {"a": 1}}'


def parts(pieces: list[str], *, thinks: bool = False) -> list[tuple[str, str]]:
    """Neighbours of one kind joined: how they were cut is nobody's business."""
    speech = Speech(MARKERS, thinks=thinks)
    said: list[Part] = [part for piece in pieces for part in speech.push(piece)] + speech.end()
    return [(kind, "".join(part.text for part in own)) for kind, own in groupby(said, lambda part: part.kind)]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


SAID = st.lists(
    st.sampled_from(["<think>", "</think>", "<call>", "</call>", "a", "<", "\n", "think>", "</", "b c"]), max_size=12
).map("".join)


@given(SAID, st.lists(st.integers(0, 200), max_size=6), st.booleans())
def test_d13_streaming_is_the_whole(text: str, places: list[int], thinks: bool) -> None:
    assert parts(cut(text, places), thinks=thinks) == parts([text], thinks=thinks)


def test_kinds() -> None:
    assert parts(["<think>\nhm</think>yes<call>{}</call>no"]) == [
        ("reasoning", "hm"), ("content", "yes"), ("call", "{}"), ("content", "no"),
    ]  # fmt: skip
    assert parts(["hm</think>yes"], thinks=True) == [("reasoning", "hm"), ("content", "yes")]
    assert parts(["never ends <think>hm"]) == [("content", "never ends "), ("reasoning", "hm")]


def voice(tools: Tools, *, thinks: bool = False) -> Voice:
    return Voice(tools, ByteTokenizer(), thinks=thinks)


def message(tools: Tools, text: str) -> tuple[dict[str, Any], str]:
    return voice(tools).whole(text, "stop")


def test_a_call_among_text() -> None:
    said, reason = message(Tools((TOOL,)), f"Wait.<call>{CALL}</call>\n")
    assert reason == "tool_calls"
    assert said["content"] == "Wait."
    [call] = said["tool_calls"]
    assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"]) == {"a": 1}


def test_what_is_no_call_stays_text() -> None:
    said, reason = message(Tools((TOOL,)), "<call>nonsense</call>!")
    assert (said, reason) == ({"content": "<call>nonsense</call>!"}, "stop")
    assert message(Tools(), f"<call>{CALL}</call>")[0]["content"] == f"<call>{CALL}</call>", "nobody offered a tool"


def test_a_forced_answer_is_a_call() -> None:
    said, reason = message(Tools((TOOL,), (TOOL,)), CALL)
    assert reason == "tool_calls" and said["content"] is None and len(said["tool_calls"]) == 1
    cut_short, why = voice(Tools((TOOL,), (TOOL,))).whole(CALL[:10], "length")
    assert (cut_short["content"], why) == (CALL[:10], "length")


def test_only_one_call_if_only_one_is_wanted() -> None:
    said, _ = message(Tools((TOOL,), (), several=False), f"<call>{CALL}</call><call>{CALL}</call>")
    assert len(said["tool_calls"]) == 1


def test_a_prompt_may_open_the_thinking() -> None:
    words = ByteTokenizer()
    assert thinks_already(words.encode("hello<think>\n"), words)
    assert not thinks_already(words.encode("hello<think></think>"), words)
    assert not thinks_already(words.encode("hello"), words)
