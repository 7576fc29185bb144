"""Anthropic's client and the embedded model: a template that knows no tools, a grammar that makes
it call one."""

from __future__ import annotations

from functools import partial
from typing import Any

import anthropic
import pytest
import trio

from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.web.server import serve_http

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {
    "name": "tell_capital",
    "description": "Tell the capital of a country",
    "input_schema": {
        "type": "object",
        "properties": {"country": {"enum": ["France", "Spain"]}, "known": {"type": "boolean"}},
        "required": ["country", "known"],
        "additionalProperties": False,
    },
}


def check(url: str) -> None:
    with anthropic.Anthropic(
        base_url=url, api_key="none", max_retries=0, timeout=120, _strict_response_validation=True
    ) as client:
        asked: Any = {
            "model": "SmolLM2-135M-Instruct",
            "messages": QUESTION,
            "extra_body": {"temperature": 0},
        }
        check_chat(client, asked)
        check_prefill(client, asked)
        check_tool(client, asked | {"tools": [TOOL], "tool_choice": {"type": "any"}})


def check_chat(client: anthropic.Anthropic, asked: Any) -> None:
    whole = client.messages.create(max_tokens=20, **asked)
    assert [block.to_dict() for block in whole.content] == [
        {"type": "text", "text": "The capital of France is Paris."}
    ]
    assert whole.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model=asked["model"], messages=asked["messages"])
    assert counted.input_tokens == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens or 0
    )
    with client.messages.stream(max_tokens=20, **asked) as stream:
        assert stream.get_final_text() == "The capital of France is Paris."


def check_prefill(client: anthropic.Anthropic, asked: Any) -> None:
    """The answer goes on in the middle of a sentence: the prompt ends there, not with the end of a
    turn."""
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    [block] = client.messages.create(max_tokens=20, **(asked | {"messages": begun})).content
    assert block.type == "text" and block.text.strip() == "Paris."


def check_tool(client: anthropic.Anthropic, asked: Any) -> None:
    whole = client.messages.create(max_tokens=60, **asked)
    [call] = whole.content
    assert (whole.stop_reason, call.type) == ("tool_use", "tool_use")
    assert call.type == "tool_use" and call.name == "tell_capital"
    assert call.input["country"] in ("France", "Spain") and isinstance(call.input["known"], bool)
    with client.messages.stream(max_tokens=60, **asked) as stream:
        [streamed] = stream.get_final_message().content
    assert streamed.type == "tool_use" and streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Paris"}
    turns = [*QUESTION, whole.to_param(), {"role": "user", "content": [result]}]
    greedy = asked["extra_body"]  # A draw could end the answer before its third token.
    answer = client.messages.create(
        max_tokens=3, model=asked["model"], messages=turns, extra_body=greedy
    )
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 3)


@pytest.mark.long
async def test_a_chat_a_beginning_and_a_forced_tool() -> None:
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(partial(run_runtime, Settings(no_ssd=True)))
        [url] = await nursery.start(
            partial(serve_http, runtime, ServerSettings(port=0), shutdown=shutdown)
        )
        await trio.to_thread.run_sync(check, url)
        await runtime.drain(10)
        shutdown.set()
