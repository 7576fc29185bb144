"""A stop string inside of a call ends the answer there: what was written of the call is no call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.output.samples import FormatTokenizer
from tests.web.responses import saying
from tests.web.serving import exchange, post, serving
from tests.web.test_malformed_calls import REQUESTS

Json = dict[str, Any]
WHOLE = '<tool_call>\n{"name": "edit", "arguments": {"path": "a"}}\n</tool_call>\n'
CUT = '<tool_call>\n{"name": "edit", "arguments": {"path": "bSTOPc"}}\n</tool_call>'
STOPS: dict[str, Json] = {
    "/v1/chat/completions": {"stop": "STOP"},
    "/v1/responses": {"stop": "STOP"},
    "/v1/messages": {"stop_sequences": ["STOP"]},
}


async def answered(path: str, text: str, *, stream: bool, **more: Any) -> Any:
    """The body; of a stream the data of all its events."""
    body = REQUESTS[path] | STOPS[path] | more | {"stream": stream}
    async with serving(saying(text, tokenizer=FormatTokenizer.of("hermes"))) as served:
        status, _, data = await exchange(served, post(path, body))
    assert status == 200, data
    if not stream:
        return json.loads(data)
    lines = [
        line.removeprefix("data: ")
        for line in data.decode().splitlines()
        if line.startswith("data: {")
    ]
    return [json.loads(line) for line in lines]


def calls_in(path: str, body: Json) -> list[tuple[str, Any]]:
    """The arguments of each call of a whole answer, with the status that responses give it."""
    match path:
        case "/v1/chat/completions":
            calls = body["choices"][0]["message"].get("tool_calls", [])
            return [("", json.loads(call["function"]["arguments"])) for call in calls]
        case "/v1/responses":
            return [
                (one["status"], one["arguments"])
                for one in body["output"]
                if one["type"] == "function_call"
            ]
        case _:
            return [
                ("", block["input"]) for block in body["content"] if block["type"] == "tool_use"
            ]


def reason_of(path: str, body: Json) -> Any:
    match path:
        case "/v1/chat/completions":
            return body["choices"][0]["finish_reason"], body["choices"][0]["matched_stop"]
        case "/v1/responses":
            return body["status"], body["incomplete_details"]
        case _:
            return body["stop_reason"], body["stop_sequence"]


STOPPED: dict[str, Any] = {
    "/v1/chat/completions": ("stop", "STOP"),
    "/v1/responses": ("completed", None),
    "/v1/messages": ("stop_sequence", "STOP"),
}


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_whole_answer_has_the_calls_before_it_alone(path: str) -> None:
    for text, whole in ((CUT, []), (WHOLE + CUT, [{"path": "a"}])):
        body = await answered(path, text, stream=False)
        calls = calls_in(path, body)
        if path == "/v1/responses":
            assert calls.pop() == ("incomplete", '{"path": "b'), "such items say so themselves"
            calls = [(status, json.loads(arguments)) for status, arguments in calls]
        assert [arguments for _, arguments in calls] == whole
        assert reason_of(path, body) == STOPPED[path]


async def test_a_streamed_chat_begins_it_and_says_stop() -> None:
    events = await answered("/v1/chat/completions", WHOLE + CUT, stream=True)
    choices = [choice for event in events for choice in event["choices"]]
    assert choices[-1]["finish_reason"] == "stop" and choices[-1]["matched_stop"] == "STOP"
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls", [])]
    texts = [
        "".join(part["function"]["arguments"] for part in parts if part["index"] == index)
        for index in (0, 1)
    ]
    assert texts == ['{"path": "a"}', '{"path": "b'], "nobody takes it for a whole one"


async def test_streamed_messages_and_responses_say_so() -> None:
    messages = await answered("/v1/messages", CUT, stream=True)
    [last] = [event["delta"] for event in messages if event["type"] == "message_delta"]
    assert last == {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}
    events = await answered("/v1/responses", CUT, stream=True)
    [done] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert (done["status"], done["arguments"]) == ("incomplete", '{"path": "b')
    assert events[-1]["type"] == "response.completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_whole_before_the_stop_string_is_one(stream: bool) -> None:
    found = await answered("/v1/chat/completions", f"{WHOLE}STOP", stream=stream)
    choice = found[-1]["choices"][0] if stream else found["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("tool_calls", "STOP")


async def test_a_token_that_is_named_as_a_stop_cuts_a_call_too() -> None:
    more = {"stop": None, "stop_token_ids": [ord("S")]}
    body = await answered("/v1/chat/completions", CUT, stream=False, **more)
    assert "tool_calls" not in body["choices"][0]["message"]
    assert reason_of("/v1/chat/completions", body) == ("stop", ord("S"))
