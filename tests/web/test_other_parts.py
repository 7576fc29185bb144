"""Parts of content in the forms of other APIs: text is read, a placeholder stands for the rest, and
names say so."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.web.test_other_servers import chat, message, response
from tests.web.test_parsing import fault
from trouper.protocol.requests import ChatPrompt, Generate
from trouper.web.openai.chat_completions import ChatRequest
from trouper.web.openai.other_servers import FILE, PLACEHOLDER
from trouper.web.responses.response_request import parse_response

Json = dict[str, Any]
TEXT: Json = {"type": "text", "text": "a"}
ANSWERS: list[tuple[Json, str]] = [
    ({"type": "refusal", "refusal": "no"}, "no"),
    ({"type": "output_text", "text": "b", "annotations": []}, "b"),
    ({"type": "text", "text": "c"}, "c"),
]
"""Parts of an earlier answer, and what the model reads."""
LEFT_OUT: list[Json] = [
    {"type": "thinking", "thinking": "hm"},
    {"type": "reasoning", "text": "hm"},
    {"type": "made_up"},
]
ASKED: list[tuple[Json, str, bool]] = [
    ({"type": "input_text", "text": "b"}, "b", False),
    ({"type": "output_text", "text": "b"}, "b", False),
    ({"type": "image", "source": {}}, PLACEHOLDER, False),
    ({"type": "input_image", "image_url": "data:"}, PLACEHOLDER, False),
    ({"type": "image_url", "image_url": {"url": "data:"}}, PLACEHOLDER, False),
    ({"type": "file", "file": {"file_id": "x"}}, FILE, True),
    ({"type": "input_file", "file_id": "x"}, FILE, True),
    ({"type": "input_audio", "input_audio": {}}, FILE, True),
    ({"type": "video_url", "video_url": {"url": "data:"}}, FILE, True),
    ({"type": "input_text"}, FILE, True),
]
"""Parts of a question: what the model reads, and whether they are named."""


def contents(generate: Generate) -> list[str]:
    assert isinstance(generate.prompt, ChatPrompt)
    return [turn["content"] for turn in generate.prompt.messages]


def said(role: str, *parts: Json) -> Json:
    return {"role": role, "content": [*parts]}


@pytest.mark.parametrize(("part", "text", "named"), ASKED)
def test_of_a_question(part: Json, text: str, named: bool) -> None:
    generate, names = chat({"messages": [said("user", TEXT, part)]})
    assert contents(generate) == [f"a{text}"]
    known = ("text", "image_url")
    expected = [f"messages.content.{part['type']}"] if named and part["type"] not in known else []
    assert names == expected
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": [part]}
    generate, _ = chat(
        {"messages": [said("user", TEXT), {"role": "assistant", "tool_calls": [call]}, result]}
    )
    assert contents(generate)[-1] == text


@pytest.mark.parametrize(("part", "text", "named"), ASKED)
def test_of_a_question_in_responses(part: Json, text: str, named: bool) -> None:
    if part == {"type": "input_text"}:
        return  # Its own type, without its text.
    generate, names = response({"input": [said("user", TEXT, part)]})
    assert contents(generate) == [f"a{text}"]
    assert names == ([f"input.content.{part['type']}"] if named else [])
    items = [
        said("user", TEXT),
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [part]},
    ]
    generate, names = response({"input": items})
    assert contents(generate)[-1] == text
    assert names == ([f"input.output.{part['type']}"] if named else [])


@pytest.mark.parametrize("kind", ["input_audio", "video_url", "document"])
def test_of_a_question_in_messages(kind: str) -> None:
    part: Json = {"type": kind, kind: {}}
    generate, names = message({"messages": [said("user", TEXT, part)]})
    assert contents(generate) == [f"a\n{FILE}"]
    assert names == [f"messages.content.{kind}"]
    call: Json = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result: Json = {"type": "tool_result", "tool_use_id": "c", "content": [part]}
    turns = [("user", TEXT), ("assistant", call), ("user", result)]
    generate, names = message({"messages": [said(role, block) for role, block in turns]})
    assert contents(generate)[-1] == FILE
    assert names == [f"messages.content.content.{kind}"]


@pytest.mark.parametrize(("part", "text"), ANSWERS)
def test_of_an_answer(part: Json, text: str) -> None:
    turns = [said("user", TEXT), said("assistant", part, *LEFT_OUT), said("user", TEXT)]
    left_out = [part["type"] for part in LEFT_OUT]
    generate, names = chat({"messages": turns})
    assert (contents(generate), names) == (
        ["a", text, "a"],
        [f"messages.content.{kind}" for kind in left_out],
    )
    generate, names = response({"input": turns})
    assert (contents(generate), names) == (
        ["a", text, "a"],
        [f"input.content.{kind}" for kind in left_out],
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "hm"},
        {"summary": "hm"},
        {"summary": ["short"], "content": [{"type": "output_text", "text": "hm"}]},
    ],
)
def test_reasoning_in_other_forms(fields: Json) -> None:
    """A proxy made them of a chat, and they come back with every later request."""
    thought: Json = {"type": "reasoning", "id": "", "status": "completed", **fields}
    turns: list[Json] = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    generate, names = response({"input": [turns[0], thought, turns[1]]})
    assert isinstance(generate.prompt, ChatPrompt)
    assert generate.prompt.messages[-1]["reasoning_content"] == "hm"
    assert names == ["input.id"]


def test_a_summary_of_what_the_client_leaves_out() -> None:
    block: Json = {"type": "compaction", "content": "We met."}
    question: Json = {"role": "user", "content": "a"}
    turns = [question, {"role": "assistant", "content": [block]}, question]
    generate, names = message({"messages": turns})
    assert (contents(generate), names) == (["a", "We met.", "a"], [])


def test_empty_instructions_are_none() -> None:
    generate, _ = response({"input": "a", "instructions": ""})
    assert contents(generate) == ["a"]


def test_what_is_no_part_is_refused_as_before() -> None:
    for part in ({"text": "x"}, "x", {"type": 3}):
        question: Json = {"role": "user", "content": [part]}
        assert str(fault(partial(chat, {"messages": [question]}))[0]).startswith(
            "messages.0.content.0"
        )
        assert str(fault(partial(response, {"input": [question]}))[0]).startswith(
            "input.0.content.0"
        )


def test_a_strict_server_refuses_them() -> None:
    for part in [*(each[0] for each in ASKED), *(each[0] for each in ANSWERS)]:
        if part["type"] not in ("text", "image_url"):
            assert (
                fault(partial(ChatRequest.parse, {"messages": [said("user", part)]}))[1]
                == "unsupported_content"
            )
        if part["type"] not in ("input_text", "output_text", "input_image", "refusal"):
            assert (
                fault(partial(parse_response, {"input": [said("user", part)]}))[1]
                == "unsupported_content"
            )


def test_what_else_a_response_shall_include_is_left_out() -> None:
    """The AI SDK asks for it by itself if a search is offered, which is left out, too."""
    kept = "message.output_text.logprobs"
    generate, names = response({"include": ["web_search_call.action.sources", kept, "a b"]})
    assert generate.logprobs == 0
    assert names == ["include.web_search_call.action.sources", "include.a%20b"]
    assert fault(lambda: response({"include": [3]}))[0] == "include.0"


@pytest.mark.parametrize("given", ["", [""], ["", "x"]])
def test_empty_stop_strings_are_none(given: Any) -> None:
    kept = ("x",) if "x" in given else ()
    for read, name in ((chat, "stop"), (response, "stop"), (message, "stop_sequences")):
        generate, names = read({"stop": given})
        assert (generate.stop, names) == (kept, [name])


def test_a_call_of_an_earlier_turn_without_its_input_as_an_object() -> None:
    for given, arguments in (
        (None, {}),
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ("{a", {"arguments": "{a"}),
    ):
        use = {"type": "tool_use", "id": "c", "name": "f", "input": given}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "y"}
        generate, _ = message(
            {"messages": [said("user", TEXT), said("assistant", use), said("user", result)]}
        )
        assert isinstance(generate.prompt, ChatPrompt)
        assert generate.prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_negative_top_k_of_messages_is_none() -> None:
    generate, names = message({"top_k": -1})
    assert (generate.sampling.top_k, names) == (0, [])
