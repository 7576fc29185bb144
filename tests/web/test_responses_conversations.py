"""Conversations by ids, by items and by references, and what is kept of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.web.responses import CALL, TOOL, Verbatim, by_client, prompts_of, saying
from tests.web.serving import ask, exchange, get, serving
from tests.web.test_openai_client import in_thread

TURNS = [f"<think>first</think>One.{CALL}", "<think>second</think>Two.", "Three."]
CHAT_TOOL = {
    "type": "function",
    "function": {key: value for key, value in TOOL.items() if key != "type"},
}


def converse_by_id(client: openai.OpenAI) -> list[Response]:
    first = client.responses.create(
        model="fake", input="Do it", instructions="Be kind.", tools=[TOOL]
    )
    [call] = [item for item in first.output if item.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "it is 7"}
    second = client.responses.create(
        model="fake",
        input=[result],
        previous_response_id=first.id,
        instructions="Be kind.",
        tools=[TOOL],
    )
    third = client.responses.create(
        model="fake",
        input="Thanks",
        previous_response_id=second.id,
        instructions="Be kind.",
        tools=[TOOL],
    )
    return [first, second, third]


def converse_by_items(client: openai.OpenAI) -> list[Response]:
    """As a coding agent does it: everything is sent again, nothing is stored."""
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Do it"}]}]
    responses = []
    for following in ("call", "Thanks", None):
        response = client.responses.create(
            model="fake",
            input=items,
            instructions="Be kind.",
            tools=[TOOL],
            store=False,
            include=["reasoning.encrypted_content"],
        )
        responses.append(response)
        items += [item.to_dict() for item in response.output]
        if following == "call":
            [call] = [item for item in response.output if item.type == "function_call"]
            parts = [{"type": "input_text", "text": "it is 7"}]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": parts})
        elif following is not None:
            items.append({"type": "message", "role": "user", "content": following})
    return responses


def converse_by_chat(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Do it"},
    ]
    for following in ("call", "Thanks", None):
        chat = client.chat.completions.create(model="fake", messages=messages, tools=[CHAT_TOOL])  # type: ignore[list-item]
        message: Any = chat.choices[0].message
        back = {
            "role": "assistant",
            "content": message.content,
            "reasoning_content": getattr(message, "reasoning_content", None),
        }
        if message.tool_calls:
            back["tool_calls"] = [call.to_dict() for call in message.tool_calls]
        messages.append(back)
        if following == "call":
            messages.append(
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "it is 7"}
            )
        elif following is not None:
            messages.append({"role": "user", "content": following})


def same_call_ids(prompt: str) -> str:
    """They are drawn; where they stand matters, not which they are."""
    value = json.loads(prompt)
    for message in value[0]:
        for call in message.get("tool_calls", ()):
            call["id"] = "drawn"
        if "tool_call_id" in message:
            message["tool_call_id"] = "drawn"
    return json.dumps(value)


async def test_three_turns_are_the_same_as_a_chat() -> None:
    seen = []
    for converse in (converse_by_chat, converse_by_id, converse_by_items):
        engine = saying(*TURNS, tokenizer=Verbatim())
        async with serving(engine) as served:
            await by_client(served, converse)
        seen.append([same_call_ids(prompt) for prompt in prompts_of(engine)])
    assert len(seen[0]) == 3
    assert seen[0] == seen[1] == seen[2]


async def test_instructions_are_not_carried_over() -> None:
    engine = saying("a", "b", tokenizer=Verbatim())
    async with serving(engine) as served:
        _, first = await ask(served, {"input": "x", "instructions": "Old."}, "/v1/responses")
        body = {"input": "y", "previous_response_id": first["id"], "instructions": "New."}
        assert (await ask(served, body, "/v1/responses"))[0] == 200
        status, last = await ask(served, {"previous_response_id": first["id"]}, "/v1/responses")
        assert status == 200 and last["instructions"] is None
    _, second, third = (json.loads(prompt)[0] for prompt in prompts_of(engine))
    assert [message["content"] for message in second] == ["New.", "x", "a", "y"]
    assert [message["content"] for message in third] == ["x", "a"]


async def test_what_the_client_made_of_an_answer_can_be_sent_back() -> None:
    """With all the fields that it adds."""

    def use(client: openai.OpenAI) -> None:
        body: Any = {"model": "fake", "tools": [TOOL]}
        made = client.responses.create(input="x", **body)
        parsed = client.responses.parse(input="x", **body)
        with client.responses.stream(input="x", **body) as stream:
            streamed = stream.get_final_response()
        answers: list[Any] = [made, parsed, streamed]
        for response in answers:
            assert [item.type for item in response.output] == [
                "reasoning",
                "message",
                "function_call",
            ]
            [call] = [item for item in response.output if item.type == "function_call"]
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
            items: Any = [{"role": "user", "content": "x"}, *response.output, output]
            assert client.responses.create(input=items, **body).status == "completed"

    async with serving(saying(f"<think>h</think>a{CALL}", tokenizer=Verbatim())) as served:
        await by_client(served, use)


async def test_tokens_are_counted_as_they_are_used() -> None:
    def use(client: openai.OpenAI) -> None:
        body: Any = {
            "model": "fake",
            "instructions": "Be kind.",
            "tools": [TOOL],
            "reasoning": {"effort": "low"},
        }
        first = client.responses.create(input="x", **body)
        for more in ({}, {"previous_response_id": first.id}):
            counted = client.responses.input_tokens.count(input="y", **body, **more)
            made = client.responses.create(input="y", **body, **more)
            assert made.usage is not None and counted.input_tokens == made.usage.input_tokens
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.input_tokens.count(model="fake", input=[])
        assert caught.value.param == "input"

    async with serving(saying("x", tokenizer=Verbatim())) as served:
        await by_client(served, use)


class Hermes(Verbatim):
    tool_parser = "hermes"


async def test_a_conversation_goes_on_behind_a_call_that_was_cut() -> None:
    """Of its arguments there is half a JSON text."""
    said = '<tool_call>{"name": "f", "arguments": {"a": "half of a long text'
    engine = saying(said, "Hello", tokenizer=Hermes())
    async with serving(engine) as served:
        asked = {"input": "x", "tools": [TOOL], "max_output_tokens": len(said) - 8}
        _, cut = await ask(served, asked, "/v1/responses")
        [call] = cut["output"]
        assert (cut["status"], call["status"], call["arguments"]) == (
            "incomplete",
            "incomplete",
            '{"a": "half of a l',
        )
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "y"}
        reference = {"type": "item_reference", "id": call["id"]}
        for more in (
            {"previous_response_id": cut["id"], "input": [result]},
            {"input": [reference, result]},
        ):
            status, answer = await ask(served, {"max_output_tokens": 2} | more, "/v1/responses")
            assert status == 200, answer
            assert (
                json.dumps({"arguments": {"arguments": call["arguments"]}})[1:-1]
                in prompts_of(engine)[-1]
            )


async def test_items_by_reference() -> None:
    engine = saying("a", "b", tokenizer=Verbatim())
    async with serving(engine) as served:
        _, first = await ask(served, {"input": "x"}, "/v1/responses")
        said = first["output"][0]["id"]
        _, _, listed = await exchange(served, get(f"/v1/responses/{first['id']}/input_items"))
        asked = json.loads(listed)["first_id"]
        body = {
            "input": [
                {"type": "item_reference", "id": said},
                {"id": asked},
                {"role": "user", "content": "y"},
            ]
        }
        assert (await ask(served, body, "/v1/responses"))[0] == 200
        status, twice = await ask(served, {"input": [{"id": said}, {"id": said}]}, "/v1/responses")
        assert (status, twice["error"]["param"]) == (400, "input.1.id"), (
            "or a short request would become a long prompt"
        )
        status, gone = await ask(
            served, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "/v1/responses"
        )
        assert (status, gone["error"]["param"], gone["error"]["code"]) == (
            404,
            "input.0.id",
            "item_not_found",
        )
    assert [message["content"] for message in json.loads(prompts_of(engine)[1])[0]] == [
        "a",
        "x",
        "y",
    ]


async def test_the_other_endpoints() -> None:
    def use(client: openai.OpenAI) -> None:
        items: Any = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "d"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "e"}]},
        ]
        made = client.responses.create(model="fake", input=items)
        assert client.responses.retrieve(made.id) == made
        listed = list(client.responses.input_items.list(made.id, limit=2))
        assert [item.type for item in listed] == [
            item.get("type", "message") for item in reversed(items)
        ]
        page = client.responses.input_items.list(made.id, order="asc", limit=4)
        assert page.has_more and [item.type for item in page.data] == ["message"] * 3 + [
            "function_call"
        ]
        beyond = client.responses.input_items.list(made.id, order="asc", after=str(listed[0].id))
        assert beyond.data == [] and beyond.has_more is False
        with pytest.raises(openai.BadRequestError, match="has ended"):
            client.responses.cancel(made.id)
        client.responses.delete(made.id)
        for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="not found"):
                gone(made.id)
        with pytest.raises(openai.BadRequestError, match="not found") as caught:
            client.responses.create(model="fake", input="x", previous_response_id=made.id)
        assert caught.value.param == "previous_response_id"

    async with serving(saying("x")) as served:
        await by_client(served, use)


async def use_the_async_client(base_url: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        made = await client.responses.create(model="fake", input="Hi")
        assert await client.responses.retrieve(made.id) == made
        async with client.responses.stream(
            model="fake", input="Hi", previous_response_id=made.id
        ) as stream:
            kinds = [event.type async for event in stream]
            assert kinds[-1] == "response.completed"
            assert (await stream.get_final_response()).output_text == "Hello"


async def test_the_async_client() -> None:
    async with serving(saying("Hello")) as served:
        await in_thread(lambda: asyncio.run(use_the_async_client(served.base_url)))


async def test_what_is_not_stored_is_not_there() -> None:
    async with serving(saying("x")) as served:
        _, made = await ask(served, {"input": "x", "store": False}, "/v1/responses")
        assert made["store"] is False
        assert (await exchange(served, get(f"/v1/responses/{made['id']}")))[0] == 404
    async with serving(saying("x"), stored_responses=0) as served:
        _, made = await ask(served, {"input": "x"}, "/v1/responses")
        assert made["store"] is False
        assert (await exchange(served, get(f"/v1/responses/{made['id']}")))[0] == 404
        status, said = await ask(served, {"input": "x", "background": True}, "/v1/responses")
        assert (status, said["error"]["param"]) == (400, "background")


async def test_the_least_recently_used_response_is_gone_first() -> None:
    async with serving(saying("x"), stored_responses=2) as served:
        ids = []
        for place in range(3):
            _, made = await ask(served, {"input": f"{place}"}, "/v1/responses")
            ids.append(made["id"])
            if place == 1:
                assert (await exchange(served, get(f"/v1/responses/{ids[0]}")))[0] == 200
        assert [(await exchange(served, get(f"/v1/responses/{one}")))[0] for one in ids] == [
            200,
            404,
            200,
        ]
