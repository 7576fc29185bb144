"""What a chat says about thinking, and about the end of its prompt."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.fakes import EOS, ByteTokenizer, FakeEngine, ints
from tests.web.serving import ask, exchange, post, serving
from trouper.actors.request_intake import thinks_already, without_open_reasoning
from trouper.protocol.plans import ThinkingLimit
from trouper.protocol.problems import RequestFailed
from trouper.protocol.requests import ChatPrompt, Generate
from trouper.protocol.sampling import SamplingDefaults
from trouper.web.openai.chat_completions import ChatRequest, chat_to_generate

SCHEMA = {"type": "json_object"}
ASSISTANT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def generate(**more: Any) -> Generate:
    body = {"messages": [{"role": "user", "content": "a"}]} | more
    [one] = chat_to_generate(ChatRequest.parse(body), "id", SamplingDefaults())
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
        (
            {"response_format": SCHEMA, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
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
            body = {
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 2,
                "thinking_token_budget": 5,
            }
            assert (await ask(served, body, "/v1/chat/completions"))[0] == 200
    limits = [admit.thinking for plan in engine.plans_seen for admit in plan.admit]
    assert limits == [
        ThinkingLimit(5, tuple(b"<think>"), tuple(b"</think>"), begun=begun)
        for begun in (False, True)
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_reasoning_are_those_of_the_text_whatever_the_interval(
    stream: bool,
) -> None:
    """An event of many tokens (--stream-interval) may hold the end of reasoning and the beginning
    of the answer."""
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


ANSWER = b'{"a": 1}'
JSON_SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
OPENED = [{"role": "user", "content": "a<think>\n"}]
"""A conversation that the template of the fake model ends as templates do that open the reasoning
whatever they are told."""


def said_of(path: str, body: Any) -> Any:
    """The text of an answer, where a client looks for it."""
    if path == "/v1/chat/completions":
        return body["choices"][0]["message"]
    return body["content"] if path == "/v1/messages" else body["output"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/v1/chat/completions",
            {"messages": OPENED, "response_format": {"type": "json_object"}},
            {"role": "assistant", "content": '{"a": 1}', "refusal": None},
        ),
        (
            "/v1/messages",
            {
                "messages": OPENED,
                "max_tokens": 99,
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            [{"type": "text", "text": '{"a": 1}'}],
        ),
        ("/v1/responses", {"input": "a<think>\n", "text": {"format": JSON_SCHEMA}}, ["message"]),
    ],
)
async def test_an_answer_that_follows_a_format_is_no_reasoning(
    path: str, body: Any, expected: Any
) -> None:
    """A grammar holds from the first token on: the reasoning that the prompt has opened is closed
    in it."""

    def token_at(_: int, position: int) -> int:
        return ANSWER[position] if position < len(ANSWER) else EOS

    engine = FakeEngine(token_at=token_at)
    async with serving(engine) as served:
        status, answer = await ask(served, body, path)
    said = said_of(path, answer)
    assert status == 200
    assert (
        [item["type"] for item in said] == expected if path == "/v1/responses" else said == expected
    )
    [admit] = [admit for plan in engine.plans_seen for admit in plan.admit]
    assert bytes(ints(admit.prompt)).endswith(b"a<think>\n<assistant>\n\n</think>\n\n")


@pytest.mark.parametrize("opened", ["x<think>", "x<think>\n", "x<think>\n\n"])
def test_open_reasoning_is_closed_as_templates_close_it(opened: str) -> None:
    tokenizer = ByteTokenizer()
    closed = without_open_reasoning(tokenizer.encode(opened), tokenizer)
    assert bytes(closed) == b"x<think>\n\n</think>\n\n"
    assert without_open_reasoning(closed, tokenizer) == closed


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ((EOS, *b"assistant\n<think>\n"), True),
        (tuple(b"x<think>\nhm"), True),
        ((*b"What does <think> mean?", EOS, *b"assistant\n"), False),
        ((*b"<think>", EOS, *b"assistant\n<think></think>"), False),
        ((EOS,), False),
        ((), False),
    ],
)
def test_a_marker_in_an_earlier_turn_opens_nothing(prompt: tuple[int, ...], opened: bool) -> None:
    """Otherwise the whole answer of a model that does not think would be reasoning, for one word of
    the question."""
    assert thinks_already(prompt, ByteTokenizer()) is opened
