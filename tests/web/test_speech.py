"""Taking an answer apart: whole or in any pieces it comes out the same."""

from __future__ import annotations

import json
from itertools import groupby

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fakes import ByteTokenizer
from tests.output.samples import parse_complete
from trouper.actors.request_intake import thinks_already
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.parsed_delta import ParsedOutput
from trouper.web.output.tool_calls import Tools

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '{"name": "f", "arguments": {"a": 1}}'


def parts(pieces: list[str], *, thinks: bool = False) -> list[tuple[str, str]]:
    """Neighbours of one kind joined: how they were cut is nobody's business."""
    speaker = make_parser(Tools((TOOL,)), thinks=thinks)
    heard = [one for piece in pieces for one in speaker.push(piece)] + speaker.end()
    joined = groupby(heard, lambda one: type(one).__name__.lower())
    return [(kind, "".join(getattr(one, "text", "") for one in own)) for kind, own in joined]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


SAID = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<call>", "</call>", "a", "<", "\n", "think>", "</", "b c"]
    ),
    max_size=12,
).map("".join)


@given(SAID, st.lists(st.integers(0, 200), max_size=6), st.booleans())
def test_d13_streaming_is_the_whole(text: str, places: list[int], thinks: bool) -> None:
    assert parts(cut(text, places), thinks=thinks) == parts([text], thinks=thinks)


CALLED = st.lists(
    st.sampled_from(["<think>", "</think>", "<call>{}</call>", "a", "\n", "\n\n", "b c"]),
    max_size=12,
)


@given(
    CALLED.map(lambda words: "".join(words).replace("{}", CALL)),
    st.lists(st.integers(0, 200), max_size=6),
)
@example(f"<call>{CALL}</call>a\nb", [len(CALL) + 14])
def test_d13_streaming_is_the_whole_with_calls(text: str, places: list[int]) -> None:
    assert parts(cut(text, places)) == parts([text])


def test_kinds() -> None:
    assert parts([f"<think>\nhm</think>yes<call>{CALL}</call>no"]) == [
        ("reasoning", "hm"),
        ("content", "yes"),
        ("callstarted", ""),
        ("callarguments", '{"a": 1}'),
        ("callended", ""),
        ("content", "no"),
    ]
    assert parts(["hm</think>yes"], thinks=True) == [("reasoning", "hm"), ("content", "yes")]
    assert parts(["never ends\n<think>hm"]) == [("content", "never ends\n"), ("reasoning", "hm")]


def test_an_answer_about_the_markers_is_an_answer() -> None:
    """And reasoning about them goes on behind them."""
    for text in ("It opens with `<think>` and ends with </think>.", "The <think> tag\nis one."):
        assert parts([text]) == parts([*text]) == [("content", text)]
    text = "It is `</think>`, I think, or `x`</think>Yes."
    expected = [("reasoning", "It is `</think>`, I think, or `x`"), ("content", "Yes.")]
    assert parts([text], thinks=True) == parts([*text], thinks=True) == expected
    assert parts(["`</think>"], thinks=True) == [("reasoning", "`")]


def make_parser(tools: Tools, *, thinks: bool = False) -> OutputParser:
    return OutputParser(tools, ByteTokenizer(), thinks=thinks)


def message(tools: Tools, text: str) -> ParsedOutput:
    return parse_complete(make_parser(tools), text, "stop")


@pytest.mark.parametrize("end", ["<", "<thi", "<think", "<cal", "</think"])
def test_what_looks_like_a_marker_at_the_end_is_said(end: str) -> None:
    assert parts(["a", end]) == [("content", f"a{end}")]
    assert parts(["hm", end], thinks=True) == [("reasoning", f"hm{end}")]


def test_a_call_among_text() -> None:
    said = message(Tools((TOOL,)), f"Wait.<call>{CALL}</call>\n")
    assert (said.content, said.reason) == ("Wait.", "tool_calls")
    [call] = said.calls
    assert call.name == "f" and json.loads(call.arguments) == {"a": 1}


def test_what_is_no_call_stays_text() -> None:
    assert message(Tools((TOOL,)), "<call>nonsense</call>!") == ParsedOutput(
        "<call>nonsense</call>!", "", (), "stop"
    )
    assert message(Tools(), f"<call>{CALL}</call>").content == f"<call>{CALL}</call>", (
        "nobody offered a tool"
    )


def test_a_forced_answer_is_a_call() -> None:
    said = message(Tools((TOOL,), (TOOL,)), CALL)
    assert (said.reason, said.content, len(said.calls)) == ("tool_calls", "", 1)


@pytest.mark.parametrize("length", [1, 2, 8, 10, 13])
def test_the_beginning_of_a_forced_call_is_no_text(length: int) -> None:
    parser = make_parser(Tools((TOOL,), (TOOL,)))
    assert parse_complete(parser, CALL[:length], "length") == ParsedOutput("", "", (), "length")


def test_only_one_call_if_only_one_is_wanted() -> None:
    text = f"<call>{CALL}</call>" * 3
    assert len(message(Tools((TOOL,), (), several=False), text).calls) == 1
    assert len(message(Tools((TOOL,)), text).calls) == 3


def test_a_prompt_may_open_the_thinking() -> None:
    words = ByteTokenizer()
    assert thinks_already(words.encode("hello<think>\n"), words)
    assert not thinks_already(words.encode("hello<think></think>"), words)
    assert not thinks_already(words.encode("hello"), words)
