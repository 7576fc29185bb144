"""The requests of docs/peers.md that other servers answered with a crash, a 500 or with silence:
here each works or is a 400."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.serving import a_stream_that_goes_on, ask, serving

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}

WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "a list of prompts": ("/v1/completions", {"prompt": ["a", "b"]}),
    "a seed beyond int64": ("/v1/chat/completions", {"messages": MESSAGES, "seed": 2**80}),
    "prompts of token ids": ("/v1/completions", {"prompt": [1, 2, 3]}),
    "echo with logprobs": ("/v1/completions", {"prompt": "ab", "echo": True, "logprobs": 2}),
    "n, logprobs, logit_bias": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 1, "logit_bias": {"5": 1}},
    ),
    "a forced tool": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"},
    ),
    "json_schema": ("/v1/chat/completions", {"messages": MESSAGES, "response_format": SCHEMA}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "messages of another type": ("/v1/chat/completions", {"messages": "x"}, "messages"),
    "a message without sense": (
        "/v1/chat/completions",
        {"messages": [{"role": "x"}]},
        "messages.0.role",
    ),
    "an empty prompt in a list": ("/v1/completions", {"prompt": [""]}, "prompt"),
    "a response without input": ("/v1/responses", {}, "input"),
    "a response to a number": ("/v1/responses", {"input": 5}, "input"),
}


@pytest.mark.parametrize(("path", "body"), WORK.values(), ids=WORK)
async def test_it_is_answered_and_others_go_on(path: str, body: dict[str, Any]) -> None:
    async with serving() as served, a_stream_that_goes_on(served):
        status, answer = await ask(served, body | {"max_tokens": 2}, path)
        assert status == 200
        wanted = body.get("n", len(body["prompt"]) if body.get("prompt") == ["a", "b"] else 1)
        assert [choice["index"] for choice in answer["choices"]] == list(range(wanted))
        if "logprobs" in body:
            assert all(choice["logprobs"] for choice in answer["choices"])


@pytest.mark.parametrize(("path", "body", "parameter"), REFUSED.values(), ids=REFUSED)
async def test_it_is_a_400_that_names_the_parameter(
    path: str, body: dict[str, Any], parameter: str
) -> None:
    async with serving() as served, a_stream_that_goes_on(served):
        status, answer = await ask(served, body, path)
        assert (status, answer["error"]["param"]) == (400, parameter)
