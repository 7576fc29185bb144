"""What a chat request becomes, and what its answer looks like when it calls tools: pure."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.fakes import ByteTokenizer
from tests.web.test_parsing import fault
from tests.web.test_thinking import generate
from trouper.actors.runtime.answer import Answer, TimeLimits
from trouper.protocol.replies import Accepted, Delta, Finished, Reply
from trouper.protocol.requests import ChatPrompt, Timeouts
from trouper.web.openai.chat_completions import ChatRequest
from trouper.web.openai.chat_dialect import ChatDialect
from trouper.web.openai.openai_dialect import Envelope, Extras
from trouper.web.openai.parameters import StreamOptions
from trouper.web.output.dialect import Choice, Usage
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.tool_calls import Tools

USER = {"role": "user", "content": "a"}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


OFFERED = [tool("f"), tool("g")]
NAMED = {"type": "function", "function": {"name": "g"}}


def tools_of(tools: Any, choice: Any, parallel: bool | None) -> Tools:
    """As a request asks for them."""
    asked = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    return ChatRequest.parse({"messages": [USER]} | asked).parsed_tools


def chat(**more: Any) -> ChatPrompt:
    prompt = generate(**more).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


# -- requests ------------------------------------------------------------------------------------


def test_messages_are_what_templates_know() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    sent = [
        {"role": "developer", "content": " be brief "},
        {
            "role": "user",
            "content": [{"type": "text", "text": " one\n"}, {"type": "text", "text": "two "}],
            "name": "eva",
        },
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    first, second, third, fourth = chat(messages=sent).messages
    assert first == {"role": "system", "content": " be brief "}, "templates know no developer"
    assert second["name"] == "eva" and " one\n" in second["content"] and "two " in second["content"]
    arguments = {"name": "f", "arguments": {"a": [1]}}
    assert third["tool_calls"] == [{"id": "c1", "type": "function", "function": arguments}]
    assert (third["content"], third["reasoning_content"]) == ("", "hm")
    assert fourth == {"role": "tool", "content": "4", "tool_call_id": "c1"}


def test_the_newer_limit_counts() -> None:
    assert generate(max_tokens=5).max_tokens == 5
    assert generate(max_tokens=5, max_completion_tokens=3).max_tokens == 3
    assert generate().max_tokens is None


def test_logprobs_are_none_or_so_many_of_the_top() -> None:
    assert [
        generate(logprobs=ask, top_logprobs=top).logprobs
        for ask, top in [(False, None), (False, 0), (True, None), (True, 3)]
    ] == [None, None, 0, 3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"chat_template_kwargs": {"max_length": 10**9}}, "chat_template_kwargs.max_length"),
        ({"chat_template_kwargs": {"padding": "max_length"}}, "chat_template_kwargs.padding"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs.a b"),
        ({"chat_template_kwargs": {"documents": 5}}, "chat_template_kwargs.documents"),
        ({"chat_template_kwargs": {"tools": ["search"]}}, "chat_template_kwargs.tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": OFFERED, "tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice",
        ),
        ({"tools": [tool("f"), tool("f")]}, "tools"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages.0.content.0",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert fault(lambda: generate(**fields))[0] == param


@pytest.mark.parametrize(
    ("choice", "parallel", "offered", "forced", "several"),
    [
        (None, None, ["f", "g"], [], True),
        ("auto", True, ["f", "g"], [], True),
        ("auto", False, ["f", "g"], [], False),
        ("none", None, [], [], True),
        ("required", None, ["f", "g"], ["f", "g"], True),
        ("required", False, ["f", "g"], ["f", "g"], False),
        (NAMED, None, ["f", "g"], ["g"], True),
    ],
)
def test_what_is_offered_and_what_is_forced(
    choice: Any, parallel: bool | None, offered: list[str], forced: list[str], several: bool
) -> None:
    tools = tools_of(OFFERED, choice, parallel)
    assert [one["function"]["name"] for one in tools.offered] == offered
    assert [one["function"]["name"] for one in tools.forced] == forced
    assert tools.several is several
    asked = {"tools": OFFERED, "parallel_tool_calls": parallel} | (
        {} if choice is None else {"tool_choice": choice}
    )
    kwargs = chat(**asked).template_kwargs
    assert [one["function"]["name"] for one in kwargs.get("tools", [])] == offered, (
        "the template hears of the same"
    )
    grammar = generate(**asked).grammar
    assert (grammar is not None) == bool(forced)
    if grammar is not None:
        assert grammar.kind == "calls"
        assert [one["name"] for one in json.loads(grammar.source)] == forced


# -- answers -------------------------------------------------------------------------------------


def call(name: str, **arguments: Any) -> str:
    return f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"


def whole(text: str, reason: Any = "stop", **more: Any) -> dict[str, Any]:
    deltas = (Delta(text, ()),)
    choice = Choice(text, (), (), Finished(reason, 3), Usage(1, 3, 0), (1,), deltas=deltas)
    [body] = shape(**more).body([choice])["choices"]
    return dict(body)


def shape(**more: Any) -> ChatDialect:
    tools = tools_of(OFFERED, more.get("choice"), more.get("parallel"))
    envelope = Envelope(id="i", created=1, model="m", fingerprint="f", tokenizer=ByteTokenizer())
    return ChatDialect(
        envelope,
        Extras(StreamOptions(), False, 1),
        lambda: OutputParser(tools, ByteTokenizer(), thinks=False),
    )


def functions(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (one["function"]["name"], json.loads(one["function"]["arguments"]))
        for one in message.get("tool_calls", [])
    ]


def test_calls_are_told_apart_from_text() -> None:
    one = whole(call("f", a=1) + "\n" + call("g"))
    assert one["message"]["content"] is None
    assert functions(one["message"]) == [("f", {"a": 1}), ("g", {})]
    assert one["finish_reason"] == "tool_calls"
    beside = whole("so: " + call("f"))
    assert (beside["message"]["content"], functions(beside["message"])) == ("so:", [("f", {})])
    plain = whole("")
    assert (plain["message"]["content"], plain["finish_reason"]) == ("", "stop")


def test_an_answer_that_was_cut_is_not_complete_although_it_called() -> None:
    assert whole(call("f") + "and then", "length")["finish_reason"] == "length"


def test_what_looks_like_a_call_and_is_none_is_text() -> None:
    said = "<call>not JSON</call> so"
    one = whole(said)
    assert (one["message"]["content"], one["finish_reason"]) == (said, "stop")
    assert "tool_calls" not in one["message"]


def test_only_one_call_where_only_one_is_wanted() -> None:
    assert functions(whole(call("f") + call("g"), parallel=False)["message"]) == [("f", {})]


def test_forced_answers_are_calls() -> None:
    one = whole('{"name": "g", "arguments": {"a": 1}}', choice=NAMED)
    assert (functions(one["message"]), one["finish_reason"]) == ([("g", {"a": 1})], "tool_calls")
    cut = whole('{"name": "g", "argu', "length", choice=NAMED)
    assert (cut["message"]["content"], cut["finish_reason"]) == ("", "length")


@pytest.mark.parametrize("size", [1, 20, 1000], ids=["letters", "pieces", "whole"])
async def test_calls_of_a_stream_are_numbered(size: int) -> None:
    """Also those that come at once."""
    send, receive = trio.open_memory_channel[Reply](1)
    answer = Answer("r", Accepted((1,), 9), receive, TimeLimits(Timeouts(), 0.0))
    one = shape()
    with send, answer:
        text = call("f") + call("g") + "x" + call("f")
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        said = b"".join(one.text(0, Delta(piece, (1,)), answer) for piece in pieces)
        said += one.ending(0, Finished("stop", 3), answer)
    chunks = [
        json.loads(event.removeprefix("data: "))["choices"][0]
        for event in said.decode().split("\n\n")[:-1]
    ]
    calls = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", [])]
    started = [part for part in calls if "name" in part["function"]]
    assert [part["index"] for part in started] == [0, 1, 2]
    assert [part["function"]["name"] for part in started] == ["f", "g", "f"]
    assert all(part["id"] for part in started)
    for number in range(3):
        own = [part["function"]["arguments"] for part in calls if part["index"] == number]
        assert json.loads("".join(own)) == {}
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "x"
    assert [chunk["finish_reason"] for chunk in chunks][-1] == "tool_calls"
