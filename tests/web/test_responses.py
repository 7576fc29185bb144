"""The responses API through the official client in strict mode: each answer and each event is a
schema check."""

from __future__ import annotations

import json
from typing import Any

import attrs
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.fakes import ByteTokenizer, FakeEngine
from tests.web.responses import (
    CALL,
    FUNCTION,
    ITEMS,
    MESSAGE,
    REASONING,
    SAID,
    TOOL,
    Verbatim,
    assembled,
    by_client,
    prompts_of,
    saying,
    told,
    without_names,
)
from tests.web.serving import ask, exchange, post, serving
from trouper.protocol.model import LoadedModel


def create_both(client: openai.OpenAI, **body: Any) -> tuple[Response, list[ResponseStreamEvent]]:
    asked = {"model": "fake", "input": "Hi"} | body
    return client.responses.create(**asked), list(client.responses.create(**asked, stream=True))


@pytest.mark.parametrize("kind", list(SAID))
async def test_streamed_is_whole(kind: str) -> None:
    async with serving(saying(SAID[kind])) as served:
        whole, events = await by_client(
            served, lambda client: create_both(client, tools=[TOOL], temperature=0)
        )
    assert (whole.status, told(whole)) == ("completed", ITEMS[kind])
    assert all(item.status == "completed" for item in whole.output)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert assembled(events) == ITEMS[kind]
    last = events[-1]
    assert last.type == "response.completed"
    assert without_names(last.response.to_dict()) == without_names(whole.to_dict())
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in last.response.output]


async def test_the_order_of_events() -> None:
    async with serving(saying(f"<think>h</think>H{CALL}")) as served:
        _, events = await by_client(served, lambda client: create_both(client, tools=[TOOL]))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


async def test_an_answer_that_was_cut_is_incomplete() -> None:
    async with serving(saying("Hello there")) as served:
        whole, events = await by_client(
            served, lambda client: create_both(client, max_output_tokens=5)
        )
    assert (whole.status, told(whole)) == ("incomplete", [(MESSAGE, "Hello")])
    assert (
        whole.incomplete_details is not None
        and whole.incomplete_details.reason == "max_output_tokens"
    )
    assert whole.completed_at is None and whole.output[0].status == "incomplete"
    assert events[-1].type == "response.incomplete" and without_names(
        events[-1].response.to_dict()
    ) == without_names(whole.to_dict())


@attrs.define(eq=False)
class Advised(FakeEngine):
    async def load(self) -> LoadedModel:
        model = await super().load()
        defaults = (("temperature", 0.6),)
        return attrs.evolve(model, card=attrs.evolve(model.card, sampling_defaults=defaults))


async def test_a_response_says_the_sampling_that_the_model_advises() -> None:
    async with serving(Advised()) as served:
        response: Response = await by_client(
            served, lambda client: client.responses.create(model="fake", input="Hi")
        )
    assert (response.temperature, response.top_p) == (0.6, 1)


async def test_usage_and_everything_that_is_said_again() -> None:
    body: dict[str, Any] = {
        "instructions": "Be kind.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.9,
        "user": "me",
        "max_output_tokens": 40,
        "tools": [TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    async with serving(saying("<think>abc</think>Hello")) as served:
        response: Response = await by_client(
            served, lambda client: client.responses.create(model="fake", input="Hi", **body)
        )
    said = response.to_dict()
    assert {name: said[name] for name in body if name != "reasoning"} == {
        name: value for name, value in body.items() if name != "reasoning"
    }
    assert response.reasoning is not None and response.reasoning.effort == "low"
    usage = response.usage
    assert usage is not None
    text = "<think>abc</think>Hello"
    assert (
        usage.output_tokens == len(text) + 1
        and usage.total_tokens == usage.input_tokens + usage.output_tokens
    )
    assert usage.output_tokens_details.reasoning_tokens == len("<think>abc</think>")
    assert response.output_text == "Hello"


@pytest.mark.parametrize("kind", list(SAID))
async def test_logprobs_belong_to_the_text(kind: str) -> None:
    include: Any = ["message.output_text.logprobs"]
    async with serving(saying(SAID[kind])) as served:
        whole, events = await by_client(
            served,
            lambda client: create_both(client, tools=[TOOL], include=include, top_logprobs=2),
        )
    for item in whole.output:
        if item.type == "message":
            [part] = item.content
            assert part.type == "output_text" and part.logprobs is not None
            assert "".join(at.token for at in part.logprobs).endswith(
                part.text[-5:].removeprefix("\n")
            )
            assert all(len(at.top_logprobs) == 2 for at in part.logprobs)
    streamed = [
        at.token
        for event in events
        if event.type == "response.output_text.delta"
        for at in event.logprobs
    ]
    assert streamed == [
        at.token
        for item in whole.output
        if item.type == "message"
        for part in item.content
        if part.type == "output_text"
        for at in part.logprobs or ()
    ]
    if kind == "plain":
        assert "".join(streamed) == SAID["plain"]


class Animal(pydantic.BaseModel):
    name: str
    legs: int


class F(pydantic.BaseModel):
    a: int


async def test_the_clients_helpers() -> None:
    """parse, stream, tools made of pydantic models."""

    def use(client: openai.OpenAI) -> None:
        parsed = client.responses.parse(model="fake", input="a cat", text_format=Animal)
        assert parsed.output_parsed == Animal(name="cat", legs=4)
        with client.responses.stream(model="fake", input="a cat", text_format=Animal) as stream:
            done = [event.parsed for event in stream if event.type == "response.output_text.done"]
            assert done == [Animal(name="cat", legs=4)]
            assert stream.get_final_response().output_parsed == Animal(name="cat", legs=4)

    engine = saying('{"name": "cat", "legs": 4}')
    async with serving(engine) as served:
        await by_client(served, use)
    grammars = [admit.grammar for plan in engine.plans_seen for admit in plan.admit]
    assert len(grammars) == 2
    for grammar in grammars:
        assert grammar is not None and set(json.loads(grammar.source)["properties"]) == {
            "name",
            "legs",
        }


async def test_a_tool_of_a_pydantic_model() -> None:
    def use(client: openai.OpenAI) -> None:
        tools: Any = [openai.pydantic_function_tool(F, name="f")]
        flat = [{"type": "function", **tool["function"]} for tool in tools]
        with client.responses.stream(model="fake", input="x", tools=flat) as stream:  # type: ignore[arg-type]
            [call] = stream.get_final_response().output
        assert call.type == "function_call" and call.parsed_arguments == {"a": 1}

    async with serving(saying(CALL)) as served:
        await by_client(served, use)


@pytest.mark.parametrize(
    ("choice", "forced", "offered"),
    [
        ("auto", None, ["f", "g"]),
        ("none", None, []),
        ("required", ["f", "g"], ["f", "g"]),
        ({"type": "function", "name": "g"}, ["g"], ["f", "g"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            None,
            ["g"],
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "g"}],
            },
            ["g"],
            ["f", "g"],
        ),
    ],
)
async def test_tool_choice(choice: Any, forced: list[str] | None, offered: list[str]) -> None:
    engine = saying('{"name": "g", "arguments": {"a": 2}}', tokenizer=Verbatim())
    async with serving(engine) as served:
        tools = [TOOL, TOOL | {"name": "g"}]
        response: Response = await by_client(
            served,
            lambda client: client.responses.create(
                model="fake", input="x", tools=tools, tool_choice=choice
            ),
        )
    [admit] = [admit for plan in engine.plans_seen for admit in plan.admit]
    [prompt] = prompts_of(engine)
    assert [tool["function"]["name"] for tool in json.loads(prompt)[1].get("tools", [])] == offered
    assert json.loads(prompt)[1].get("enable_thinking") is (False if forced else None)
    if forced is None:
        assert admit.grammar is None
    else:
        assert admit.grammar is not None
        assert [one["name"] for one in json.loads(admit.grammar.source)] == forced
        [call] = response.output
        assert call.type == "function_call" and (call.name, call.arguments) == ("g", '{"a": 2}')


@pytest.mark.parametrize(
    ("effort", "variables"),
    [
        (None, {}),
        ("none", {"enable_thinking": False}),
        ("minimal", {"enable_thinking": True, "reasoning_effort": "minimal"}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
async def test_effort_is_the_templates(effort: str | None, variables: dict[str, Any]) -> None:
    engine = saying("x", tokenizer=Verbatim())
    async with serving(engine) as served:
        body = {"input": "x", "reasoning": {"effort": effort}}
        assert (await ask(served, body, "/v1/responses"))[0] == 200
        own = body | {"chat_template_kwargs": {"enable_thinking": "mine"}}
        assert (await ask(served, own, "/v1/responses"))[0] == 200
    first, second = (json.loads(prompt)[1] for prompt in prompts_of(engine))
    assert first == variables
    assert second == variables | {"enable_thinking": "mine"}


async def test_a_model_that_does_not_think_has_an_effort_of_no_effect() -> None:
    """Coding agents send one to whatever model they are given."""

    class Thoughtless(ByteTokenizer):
        thinking = None  # type: ignore[assignment]

    async with serving(saying("x", tokenizer=Thoughtless())) as served:
        assert (
            await ask(served, {"input": "x", "reasoning": {"effort": "high"}}, "/v1/responses")
        )[0] == 200


async def test_a_coding_agent() -> None:
    """The body that Codex sends, byte for byte what matters to it of the events: `event:` lines,
    items when done."""
    body = {
        "model": "fake",
        "instructions": "You are a coding agent.",
        "store": False,
        "stream": True,
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "<permissions>"}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "fix it"}],
            },
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "h"}],
                "encrypted_content": None,
            },
            {"type": "function_call", "name": "f", "arguments": '{"a":1}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "done"},
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "prompt_cache_key": "thread",
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "medium"},
        "client_metadata": {"a": "b"},
        "service_tier": None,
    }
    async with serving(saying(f"<think>hm</think>On it.{CALL}")) as served:
        status, headers, said = await exchange(served, post("/v1/responses", body))
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    events = []
    for block in said.decode().split("\n\n"):
        lines = [
            line
            for line in block.replace("\r", "").split("\n")
            if line.startswith(("event: ", "data: {"))
        ]
        if len(lines) == 2:
            data = json.loads(lines[1].removeprefix("data: "))
            assert lines[0] == f"event: {data['type']}"
            events.append(data)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == [REASONING, MESSAGE, FUNCTION]
    assert done[2]["name"] == "f" and json.loads(done[2]["arguments"]) == {"a": 1}
    assert events[-1]["type"] == "response.completed"
    assert {"input_tokens", "output_tokens", "total_tokens"} <= set(events[-1]["response"]["usage"])
    assert b"[DONE]" not in said
