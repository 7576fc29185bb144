"""What a chat says about thinking, and about the end of its prompt."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.fakes import EOS, FakeEngine
from tests.web.serving import ask, exchange, post, serving
from trouper.protocol.plans import ThinkingLimit
from trouper.protocol.problems import RequestFailed
from trouper.protocol.requests import ChatPrompt, Generate
from trouper.web.openai.chat_completions import chat_to_generate, parse_chat

SCHEMA = {"type": "json_object"}
ASSISTANT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def generate(**more: Any) -> Generate:
    body = {"messages": [{"role": "user", "content": "a"}]} | more
    [one] = chat_to_generate(parse_chat(body), "id", None)
    return one


def variables(**more: Any) -> dict[str, Any]:
    prompt = generate(**more).prompt
    assert isinstance(prompt, ChatPrompt)
    return dict(prompt.template_kwargs)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}),
        ({"thinking_token_budget": 0}, {"enable_thinking": False}),
        ({"thinking_token_budget": 9}, {}),
        ({"response_format": SCHEMA}, {"enable_thinking": False}),
        ({"response_format": SCHEMA, "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (
            {"continue_final_message": True, "messages": ASSISTANT},
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
    ],
)
def test_what_the_template_hears(asked: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert variables(**asked) == wanted


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"reasoning_effort": "very"}, "reasoning_effort"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "add_generation_prompt": True, "messages": ASSISTANT},
            "continue_final_message",
        ),
    ],
)
def test_what_cannot_be(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestFailed) as refused:
        generate(**asked)
    assert (refused.value.problem.status, refused.value.problem.param) == (400, param)


async def test_a_budget_reaches_the_engine() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        for content in ("a", "a<think>"):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "thinking_token_budget": 5}
            assert (await ask(served, body, "/v1/chat/completions"))[0] == 200
    limits = [admit.thinking for plan in engine.plans_seen for admit in plan.admit]
    assert limits == [ThinkingLimit(5, tuple(b"<think>"), tuple(b"</think>"), begun=begun) for begun in (False, True)]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_reasoning_are_those_of_the_text_whatever_the_interval(stream: bool) -> None:
    """An event of many tokens (--stream-interval) may hold the end of reasoning and the beginning of the answer."""
    said = b"<think>because</think>Yes."

    def token_at(_: int, position: int) -> int:
        return said[position] if position < len(said) else EOS

    counted = []
    for interval in (1, 7, 100):
        async with serving(FakeEngine(token_at=token_at), {"stream_interval": interval}) as served:
            body = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
            body |= {"stream_options": {"include_usage": True}} if stream else {}
            _, _, data = await exchange(served, post("/v1/chat/completions", body))
            counted.append(re.findall(rb'"reasoning_tokens":(\d+)', data)[-1])
    assert counted[0] != b"0"
    assert counted == [counted[0]] * 3
