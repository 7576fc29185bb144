"""The responses API through the official client in strict mode: each answer and each event is a schema check."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import openai
import pydantic
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent

from tests.fakes import EOS, ByteTokenizer, FakeEngine, TokenAt, ints
from tests.web.serving import Served, a_stream_that_goes_on, ask, eventually, exchange, get, pace, post, serving
from tests.web.test_openai_client import in_thread, strict
from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.actors.fleet import Lease, OneModel
from trouper.web.server import serve_http

TOOL: Any = {
    "type": "function",
    "name": "f",
    "description": "does f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
CALL = '<call>{"name": "f", "arguments": {"a": 1}}</call>'
SAID = {
    "plain": "Hello there",
    "nothing": "",
    "thought": "<think>\nhm, so</think>Hello",
    "only thought": "<think>hm",
    "call": CALL,
    "everything": f"<think>let me see</think>\n\nI call it.\n{CALL}\n{CALL}",
    "call among text": f"a{CALL}b",
}
"""With what it must become below, in ITEMS."""
MESSAGE, REASONING, FUNCTION = "message", "reasoning", "function_call"
ITEMS = {
    "plain": [(MESSAGE, "Hello there")],
    "nothing": [(MESSAGE, "")],
    "thought": [(REASONING, "hm, so"), (MESSAGE, "Hello")],
    "only thought": [(REASONING, "hm")],
    "call": [(FUNCTION, '{"a": 1}')],
    "everything": [
        (REASONING, "let me see"), (MESSAGE, "\n\nI call it.\n"), (FUNCTION, '{"a": 1}'), (FUNCTION, '{"a": 1}'),
    ],
    "call among text": [(MESSAGE, "a"), (FUNCTION, '{"a": 1}'), (MESSAGE, "b")],
}  # fmt: skip


async def by_client(served: Served, use: Callable[[openai.OpenAI], Any]) -> Any:
    """In a thread, with a client that is closed afterwards."""

    def run() -> Any:
        with strict(served) as client:
            return use(client)

    return await in_thread(run)


class Verbatim(ByteTokenizer):
    """Every part of every message, and every variable, is in the prompt."""

    def encode_chat(self, messages: Sequence[Any], **variables: Any) -> tuple[int, ...]:
        return self.encode(json.dumps([messages, variables], sort_keys=True))


def says(*texts: str) -> TokenAt:
    """One text for each prompt, in the order in which they come; the last one for all that follow."""
    keys: dict[int, bytes] = {}

    def token_at(key: int, position: int) -> int:
        if key not in keys:
            keys[key] = texts[min(len(keys), len(texts) - 1)].encode()
        data = keys[key]
        return data[position] if position < len(data) else EOS

    return token_at


def saying(*texts: str, **more: Any) -> FakeEngine:
    return FakeEngine(before_step=pace, token_at=says(*texts), **more)


def prompts_of(engine: FakeEngine) -> list[str]:
    return [bytes(ints(admit.prompt)).decode() for plan in engine.plans_seen for admit in plan.admit]


def told(response: Response) -> list[tuple[str, str]]:
    """Each item's type and text."""
    said = []
    for item in response.output:
        match item.type:
            case "message":
                said.append((MESSAGE, "".join(part.text for part in item.content if part.type == "output_text")))
            case "reasoning":
                said.append((REASONING, "".join(part.text for part in item.content or ())))
            case "function_call":
                said.append((FUNCTION, item.arguments))
    return said


def without_names(value: Any) -> Any:
    """What two runs of one request have in common: everything but ids, times and what was cached."""
    if isinstance(value, dict):
        drawn = ("id", "item_id", "call_id", "created_at", "completed_at", "cached_tokens")
        return {key: without_names(one) for key, one in value.items() if key not in drawn}
    return [without_names(one) for one in value] if isinstance(value, list) else value


def assembled(events: Sequence[ResponseStreamEvent]) -> list[tuple[str, str]]:
    """Of nothing but additions and deltas."""
    items: dict[int, tuple[str, str]] = {}
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            items[event.output_index] = (event.item.type, "")
        elif event.type in (
            "response.output_text.delta",
            "response.reasoning_text.delta",
            "response.function_call_arguments.delta",
        ):
            kind, text = items[event.output_index]
            items[event.output_index] = (kind, text + event.delta)
    return list(items.values())


# -- whole and streamed --------------------------------------------------------------------------------


def create_both(client: openai.OpenAI, **body: Any) -> tuple[Response, list[ResponseStreamEvent]]:
    asked = {"model": "fake", "input": "Hi"} | body
    return client.responses.create(**asked), list(client.responses.create(**asked, stream=True))


@pytest.mark.parametrize("kind", list(SAID))
async def test_streamed_is_whole(kind: str) -> None:
    async with serving(saying(SAID[kind])) as served:
        whole, events = await by_client(served, lambda client: create_both(client, tools=[TOOL], temperature=0))
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
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip


async def test_an_answer_that_was_cut_is_incomplete() -> None:
    async with serving(saying("Hello there")) as served:
        whole, events = await by_client(served, lambda client: create_both(client, max_output_tokens=5))
    assert (whole.status, told(whole)) == ("incomplete", [(MESSAGE, "Hello")])
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.completed_at is None and whole.output[0].status == "incomplete"
    assert events[-1].type == "response.incomplete" and without_names(events[-1].response.to_dict()) == without_names(
        whole.to_dict()
    )


async def test_usage_and_everything_that_is_said_again() -> None:
    body: dict[str, Any] = {
        "instructions": "Be kind.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9, "user": "me",
        "max_output_tokens": 40, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"}, "safety_identifier": "s", "prompt_cache_key": "k",
    }  # fmt: skip
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
    assert usage.output_tokens == len(text) + 1 and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == len("<think>abc</think>"[len("<think") :])
    assert response.output_text == "Hello"


@pytest.mark.parametrize("kind", list(SAID))
async def test_logprobs_belong_to_the_text(kind: str) -> None:
    include: Any = ["message.output_text.logprobs"]
    async with serving(saying(SAID[kind])) as served:
        whole, events = await by_client(
            served, lambda client: create_both(client, tools=[TOOL], include=include, top_logprobs=2)
        )
    for item in whole.output:
        if item.type == "message":
            [part] = item.content
            assert part.type == "output_text" and part.logprobs is not None
            assert "".join(at.token for at in part.logprobs).endswith(part.text[-5:].removeprefix("\n"))
            assert all(len(at.top_logprobs) == 2 for at in part.logprobs)
    streamed = [at.token for event in events if event.type == "response.output_text.delta" for at in event.logprobs]
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
        assert grammar is not None and set(json.loads(grammar.source)["properties"]) == {"name", "legs"}


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
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}, None, ["g"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]},
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
            lambda client: client.responses.create(model="fake", input="x", tools=tools, tool_choice=choice),
        )
    [admit] = [admit for plan in engine.plans_seen for admit in plan.admit]
    [prompt] = prompts_of(engine)
    assert [tool["function"]["name"] for tool in json.loads(prompt)[1].get("tools", [])] == offered
    assert json.loads(prompt)[1].get("enable_thinking") is (False if forced else None)
    if forced is None:
        assert admit.grammar is None
    else:
        assert admit.grammar is not None
        assert all((f'"const":"{name}"' in admit.grammar.source) == (name in forced) for name in "fg")
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


async def test_a_model_that_does_not_think_has_no_effort() -> None:
    class Thoughtless(ByteTokenizer):
        thinking = None  # type: ignore[assignment]

    async with serving(saying("x", tokenizer=Thoughtless())) as served:
        status, said = await ask(served, {"input": "x", "reasoning": {"effort": "high"}}, "/v1/responses")
        assert (status, said["error"]["param"]) == (400, "reasoning.effort")
        assert (await ask(served, {"input": "x", "reasoning": {"effort": "none"}}, "/v1/responses"))[0] == 200


# -- conversations -------------------------------------------------------------------------------------

TURNS = [f"<think>first</think>One.{CALL}", "<think>second</think>Two.", "Three."]
CHAT_TOOL = {"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}


def converse_by_id(client: openai.OpenAI) -> list[Response]:
    first = client.responses.create(model="fake", input="Do it", instructions="Be kind.", tools=[TOOL])
    [call] = [item for item in first.output if item.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "it is 7"}
    second = client.responses.create(
        model="fake", input=[result], previous_response_id=first.id, instructions="Be kind.", tools=[TOOL]
    )
    third = client.responses.create(
        model="fake", input="Thanks", previous_response_id=second.id, instructions="Be kind.", tools=[TOOL]
    )
    return [first, second, third]


def converse_by_items(client: openai.OpenAI) -> list[Response]:
    """As a coding agent does it: everything is sent again, nothing is stored."""
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Do it"}]}]
    responses = []
    for following in ("call", "Thanks", None):
        response = client.responses.create(
            model="fake", input=items, instructions="Be kind.", tools=[TOOL], store=False,
            include=["reasoning.encrypted_content"],
        )  # fmt: skip
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
    messages: Any = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Do it"}]
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
            messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "it is 7"})
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
            assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
            [call] = [item for item in response.output if item.type == "function_call"]
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
            items: Any = [{"role": "user", "content": "x"}, *response.output, output]
            assert client.responses.create(input=items, **body).status == "completed"

    async with serving(saying(f"<think>h</think>a{CALL}", tokenizer=Verbatim())) as served:
        await by_client(served, use)


async def test_tokens_are_counted_as_they_are_used() -> None:
    def use(client: openai.OpenAI) -> None:
        body: Any = {"model": "fake", "instructions": "Be kind.", "tools": [TOOL], "reasoning": {"effort": "low"}}
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
        assert (status, twice["error"]["param"]) == (400, "input.1.id"), "or a short request would become a long prompt"
        status, gone = await ask(served, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "/v1/responses")
        assert (status, gone["error"]["param"], gone["error"]["code"]) == (404, "input.0.id", "item_not_found")
    assert [message["content"] for message in json.loads(prompts_of(engine)[1])[0]] == ["a", "x", "y"]


async def test_the_other_endpoints() -> None:
    def use(client: openai.OpenAI) -> None:
        items: Any = [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "d"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "e"}]},
        ]  # fmt: skip
        made = client.responses.create(model="fake", input=items)
        assert client.responses.retrieve(made.id) == made
        listed = list(client.responses.input_items.list(made.id, limit=2))
        assert [item.type for item in listed] == [item.get("type", "message") for item in reversed(items)]
        page = client.responses.input_items.list(made.id, order="asc", limit=4)
        assert page.has_more and [item.type for item in page.data] == ["message"] * 3 + ["function_call"]
        beyond = client.responses.input_items.list(made.id, order="asc", after=str(listed[0].id))
        assert beyond.data == [] and beyond.has_more is False
        with pytest.raises(openai.BadRequestError, match="has ended"):
            client.responses.cancel(made.id)
        client.responses.delete(made.id)
        for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="is gone"):
                gone(made.id)
        with pytest.raises(openai.NotFoundError, match="is gone") as caught:
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
        async with client.responses.stream(model="fake", input="Hi", previous_response_id=made.id) as stream:
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
        assert [(await exchange(served, get(f"/v1/responses/{one}")))[0] for one in ids] == [200, 404, 200]


# -- in the background ---------------------------------------------------------------------------------


async def state(served: Served, response_id: str) -> Any:
    return json.loads((await exchange(served, get(f"/v1/responses/{response_id}")))[2])


async def until(served: Served, response_id: str, status: str) -> Any:
    with trio.fail_after(20):
        while (now := await state(served, response_id))["status"] != status:  # noqa: ASYNC110
            await trio.sleep(0.005)
    return now


async def test_the_background_outlives_the_connection() -> None:
    """From the queue to the end, and what was said so far on the way."""
    hurry = trio.Event()

    async def before(_: object) -> None:
        await trio.sleep(0.002 if hurry.is_set() else 0.05)

    engine = FakeEngine(before_step=before, token_at=says("y" * 100))
    async with serving(engine, settings={"completion_batch_size": 1}) as served:
        _, first = await ask(served, {"input": "one", "background": True}, "/v1/responses")
        _, second = await ask(served, {"input": "two", "background": True}, "/v1/responses")
        assert (first["status"], second["status"], first["background"]) == ("queued", "queued", True)
        status, said = await ask(served, {"input": "x", "previous_response_id": first["id"]}, "/v1/responses")
        assert (status, said["error"]["param"]) == (400, "previous_response_id")
        await until(served, first["id"], "in_progress")
        await eventually(lambda: served.runtime.health().scheduler.tokens_generated > 5)
        running = await state(served, first["id"])
        assert running["output"][0]["status"] == "in_progress" and "yyy" in running["output"][0]["content"][0]["text"]
        assert (await state(served, second["id"]))["status"] == "queued"
        hurry.set()
        done = await until(served, first["id"], "completed")
        assert done["output"][0]["content"][0]["text"] == "y" * 100
        Response.model_validate(done, strict=False)
        await until(served, second["id"], "completed")


async def test_a_full_queue_refuses_before_there_is_a_response() -> None:
    tight = {"completion_batch_size": 1, "max_queue_size": 0}
    async with serving(FakeEngine(before_step=pace), settings=tight) as served:
        body = {"input": "x", "background": True, "ignore_eos": True, "max_output_tokens": 3000}
        _, running = await ask(served, body, "/v1/responses")
        await eventually(lambda: served.busy == 1)
        status, said = await ask(served, body, "/v1/responses")
        assert (status, said["error"]["code"]) == (429, "queue_full")
        await ask(served, {}, f"/v1/responses/{running['id']}/cancel")
        await eventually(lambda: served.busy == 0)


LONG = {"input": "x", "ignore_eos": True, "max_output_tokens": 3000}


@pytest.mark.parametrize("how", ["cancel", "request", "delete"])
async def test_a_response_in_the_background_is_cancelled(how: str) -> None:
    async with serving(FakeEngine(before_step=pace)) as served:
        _, made = await ask(served, LONG | {"background": True}, "/v1/responses", "X-Request-Id: mine\r\n")
        await until(served, made["id"], "in_progress")
        if how == "cancel":
            for _ in range(2):
                cancelled: Response = await by_client(served, lambda client: client.responses.cancel(made["id"]))
                assert cancelled.status == "cancelled" and cancelled.error is None
        elif how == "request":
            assert (await ask(served, {}, "/v1/requests/mine/cancel"))[0] == 200
        else:
            await by_client(served, lambda client: client.responses.delete(made["id"]))
            assert (await exchange(served, get(f"/v1/responses/{made['id']}")))[0] == 404
        await eventually(lambda: served.busy == 0)
        if how != "delete":
            after = await state(served, made["id"])
            assert after["status"] == "cancelled"
            assert {item["status"] for item in after["output"]} <= {"incomplete"}
            body = {"input": "x", "previous_response_id": made["id"]}
            status, said = await ask(served, body, "/v1/responses")
            assert (status, said["error"]["param"]) == (400, "previous_response_id")


async def test_a_stream_is_cancelled_by_its_response_id() -> None:
    async with serving(FakeEngine(before_step=pace)) as served:

        def use(client: openai.OpenAI) -> list[ResponseStreamEvent]:
            events = []
            for event in client.responses.create(model="fake", stream=True, input="x", extra_body=LONG):
                events.append(event)
                if event.type == "response.created":
                    assert client.responses.retrieve(event.response.id).status == "in_progress"
                if len(events) == 10:
                    client.responses.cancel(events[0].response.id)  # type: ignore[union-attr]
            return events

        events = await by_client(served, use)
        assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
        last = events[-1]
        assert last.type == "response.failed" and (last.response.status, last.response.error) == ("cancelled", None)
        assert (await state(served, last.response.id))["status"] == "cancelled"
        await eventually(lambda: served.busy == 0)


async def test_a_stream_whose_client_leaves_is_over() -> None:
    async with serving(FakeEngine(before_step=pace)) as served:
        async with await served.connect() as client:
            await client.send_all(post("/v1/responses", LONG | {"stream": True}))
            received = b""
            while b"output_text.delta" not in received:
                received += await client.receive_some()
        response_id = json.loads(received.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
        await eventually(lambda: served.busy == 0)
        with trio.fail_after(20):
            while (await exchange(served, get(f"/v1/responses/{response_id}")))[0] != 404:  # noqa: ASYNC110
                await trio.sleep(0.005)


async def test_a_background_stream_can_be_read_again_from_the_middle() -> None:
    def use(client: openai.OpenAI) -> None:
        with client.responses.create(model="fake", input="x", background=True, stream=True) as first:
            begun = [next(first) for _ in range(6)]
        assert [event.type for event in begun[:3]] == [
            "response.created", "response.queued", "response.in_progress",
        ]  # fmt: skip
        response_id = begun[0].response.id  # type: ignore[union-attr]
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=begun[-1].sequence_number))
        again = list(client.responses.retrieve(response_id, stream=True))
        assert [event.to_dict() for event in again] == [event.to_dict() for event in [*begun, *rest]]
        assert again[-1].type == "response.completed"
        assert again[-1].response == client.responses.retrieve(response_id)
        with client.responses.stream(response_id=response_id, starting_after=4) as stream:
            assert [event.sequence_number for event in stream] == list(range(5, len(again)))
            assert stream.get_final_response().output_text == again[-1].response.output_text
        assert list(client.responses.retrieve(response_id, stream=True, starting_after=10**6)) == []
        plain = client.responses.create(model="fake", input="x")
        with pytest.raises(openai.BadRequestError, match="background and stream"):
            client.responses.retrieve(plain.id, stream=True)

    async with serving(saying("Hello there, " * 8)) as served:
        await by_client(served, use)


async def test_a_quiet_background_stream_shows_signs_of_life() -> None:
    async def before(_: object) -> None:
        await trio.sleep(0.15)

    async with serving(FakeEngine(before_step=before), heartbeat_s=0.05) as served:
        body = {"input": "x", "background": True, "stream": True, "max_output_tokens": 2}
        _, _, said = await exchange(served, post("/v1/responses", body))
    assert said.count(b": keep-alive") >= 2


async def test_shutdown_leaves_no_response_running() -> None:
    """serving() sees to it that everything ends, and soon."""
    async with serving(FakeEngine(before_step=pace)) as served:
        for stream in (False, True):
            async with await served.connect() as client:
                await client.send_all(post("/v1/responses", LONG | {"background": True, "stream": stream}))
                await client.receive_some()
        await eventually(lambda: served.busy == 2)


async def test_a_drain_lets_the_background_finish() -> None:
    async with serving(FakeEngine(before_step=pace)) as served:
        body = {"input": "x", "background": True, "ignore_eos": True, "max_output_tokens": 100}
        _, made = await ask(served, body, "/v1/responses")
        assert await served.runtime.drain(20)
        done = await until(served, made["id"], "incomplete")
        assert done["usage"]["output_tokens"] == 100
        status, said = await ask(served, body, "/v1/responses")
        assert (status, said["error"]["code"]) == (503, "draining")


class Counted(OneModel):
    """Knows how many requests use it."""

    leases = 0

    async def lease(self, name: str | None) -> Lease:
        lease = await super().lease(name)
        self.leases += 1
        return Lease(lease.name, lease.runtime, self._returned)

    def _returned(self) -> None:
        self.leases -= 1


async def test_the_background_keeps_its_model() -> None:
    """Until it has ended, not until its connection has; nothing else keeps one."""
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        chosen, engine = Settings(no_ssd=True, gather_ms=0), FakeEngine(before_step=pace)
        runtime: Runtime = await nursery.start(partial(run_runtime, chosen, engine=engine))
        models = Counted(runtime)
        [url] = await nursery.start(partial(serve_http, models, ServerSettings(port=0), shutdown=shutdown))
        served = Served(int(url.rsplit(":", 1)[1]), runtime, engine, shutdown)
        _, made = await ask(served, LONG | {"background": True}, "/v1/responses")
        await ask(served, {"input": "x", "max_output_tokens": 2}, "/v1/responses")
        await eventually(lambda: models.leases == 1)
        assert (await state(served, made["id"]))["status"] in ("queued", "in_progress")
        await ask(served, {}, f"/v1/responses/{made['id']}/cancel")
        await eventually(lambda: models.leases == 0)
        await runtime.drain(0)
        shutdown.set()


@pytest.mark.parametrize("background", [False, True])
async def test_an_engine_that_crashes(background: bool) -> None:
    """One `error` and a response that failed; whoever asks later reads the same."""

    async def before(plan: Any) -> None:
        await pace(plan)
        if plan.decode and plan.step > 20:
            raise RuntimeError("the device failed")

    async with serving(FakeEngine(before_step=before)) as served:

        def use(client: openai.OpenAI) -> None:
            body: Any = LONG | {"background": background}
            events = list(client.responses.create(model="fake", stream=True, input="x", extra_body=body))
            kinds = [event.type for event in events]
            assert kinds.count("error") == 1 and kinds[-1] == "response.failed"
            [error] = [event for event in events if event.type == "error"]
            assert error.code == "engine_stopped"
            response = events[-1].response  # type: ignore[union-attr]
            assert response.status == "failed" and response.error is not None
            assert client.responses.retrieve(response.id) == response

        await by_client(served, use)
        if not background:
            await eventually(lambda: served.runtime.health().ready)
            assert (await ask(served, LONG, "/v1/responses"))[0] == 500


# -- agents --------------------------------------------------------------------------------------------


async def test_a_coding_agent() -> None:
    """The body that Codex sends, byte for byte what matters to it of the events: `event:` lines, items when done."""
    body = {
        "model": "fake", "instructions": "You are a coding agent.", "store": False, "stream": True,
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}], "encrypted_content": None},
            {"type": "function_call", "name": "f", "arguments": '{"a":1}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "done"},
        ],
        "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False, "prompt_cache_key": "thread",
        "reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "medium"}, "client_metadata": {"a": "b"}, "service_tier": None,
    }  # fmt: skip
    async with serving(saying(f"<think>hm</think>On it.{CALL}")) as served:
        status, headers, said = await exchange(served, post("/v1/responses", body))
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    events = []
    for block in said.decode().split("\n\n"):
        lines = [line for line in block.replace("\r", "").split("\n") if line.startswith(("event: ", "data: {"))]
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


# -- what cannot be ------------------------------------------------------------------------------------

NAMELESS = {key: value for key, value in TOOL.items() if key != "name"}
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"input": None}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": 3}, 400, "input"),
    ({"input": [3]}, 400, "input.0"),
    ({"input": [{"role": "wizard", "content": "x"}]}, 400, "input.0.role"),
    ({"input": [{"role": "user", "content": 3}]}, 400, "input.0.content"),
    ({"input": [{"role": "user", "content": "x", "status": "done"}]}, 400, "input.0.status"),
    ({"input": [{"role": "user", "content": "x", "id": ""}]}, 400, "input.0.id"),
    ({"input": [{"role": "user", "content": "x", "new": 1}]}, 400, "input.0.new"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, 400, "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}, 400, "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, 400, "input.0.content.0.text"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "", "x": 1}]}]},
        400,
        "input.0.content.0.x",
    ),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, 400, "input.0.type"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]}, 400, "input.0.arguments"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[]"}]}, 400, "input.0.arguments"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, 400, "input.0.call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, 400, "input.0.call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": None}]}, 400, "input.0.output"),
    ({"input": [{"type": "reasoning", "summary": "x"}]}, 400, "input.0.summary"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, 400, "input.0.encrypted_content"),
    ({"input": [{"type": "item_reference", "id": "none"}]}, 404, "input.0.id"),
    ({"input": [{"type": "item_reference", "id": 3}]}, 400, "input.0.id"),
    ({"metadata": {"a": 1}}, 400, "metadata.a"),
    ({"metadata": {"a": "x" * 513}}, 400, "metadata.a"),
    ({"metadata": {str(n): "x" for n in range(17)}}, 400, "metadata"),
    ({"model": "other"}, 404, "model"),
    ({"previous_response_id": "resp_none"}, 404, "previous_response_id"),
    ({"conversation": "conv_1"}, 400, "conversation"),
    ({"prompt": {"id": "x"}}, 400, "prompt"),
    ({"truncation": "auto"}, 400, "truncation"),
    ({"service_tier": "flex"}, 400, "service_tier"),
    ({"max_tokens": 3}, 400, "max_tokens"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"max_output_tokens": 10**9}, 400, "max_output_tokens"),
    ({"max_output_tokens": "3"}, 400, "max_output_tokens"),
    ({"max_tool_calls": 0}, 400, "max_tool_calls"),
    ({"input": "x" * 5000}, 400, "input"),
    ({"temperature": 3}, 400, "temperature"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, 400, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, 400, "include.0"),
    ({"include": "x"}, 400, "include"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools.0.type"),
    ({"tools": [{"type": "custom", "name": "f"}]}, 400, "tools.0.type"),
    ({"tools": [NAMELESS]}, 400, "tools.0.name"),
    ({"tools": [TOOL | {"new": 1}]}, 400, "tools.0.new"),
    ({"tools": [TOOL | {"async": True}]}, 400, "tools.0.async"),
    ({"tools": [TOOL, TOOL]}, 400, "tools"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, 400, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, 400, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, 400, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        400,
        "tool_choice.tools",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [TOOL]}}, 400, "tool_choice.mode"),
    (
        {"tools": [TOOL], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
        400,
        "tool_choice",
    ),
    ({"text": {"format": {"type": "xml"}}}, 400, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, 400, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}}, 400, "text.format.schema"),
    ({"text": {"format": {"type": "regex", "pattern": "wrong"}}}, 400, "text.format.pattern"),
    ({"text": {"verbosity": "low"}}, 400, "text.verbosity"),
    ({"text": {"other": 1}}, 400, "text.other"),
    ({"reasoning": {"effort": "most"}}, 400, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, 400, "reasoning.summary"),
    ({"reasoning": "high"}, 400, "reasoning"),
    ({"background": True, "store": False}, 400, "background"),
    ({"stream_options": {}}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, 400, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"include_usage": True}}, 400, "stream_options.include_usage"),
    ({"seed": "x"}, 400, "seed"),
    ({"cache_salt": "x" * 1025}, 400, "cache_salt"),
    ({"chat_template_kwargs": {"self": 1}}, 400, "chat_template_kwargs.self"),
    ({"made_up": 1}, 400, "made_up"),
]


async def test_errors_name_the_parameter() -> None:
    async with serving(saying("x")) as served:
        for body, status, param in REFUSED:
            got, said = await ask(served, {"input": "x"} | body, "/v1/responses")
            assert (got, said["error"]["param"]) == (status, param), (body, said)
            assert set(said["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=yes", "stream"),
        ("?stream=true", "stream"),
        ("?starting_after=1", "starting_after"),
        ("?stream=true&starting_after=x", "stream"),
        ("?include_obfuscation=true", "include_obfuscation"),
        ("?include=message.output_text.logprobs", "include"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=%C2%B2", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?before=x", "before"),
    ],
)
async def test_queries_that_cannot_be(query: str, param: str) -> None:
    async with serving(saying("x")) as served:
        _, made = await ask(served, {"input": "x"}, "/v1/responses")
        status, _, said = await exchange(served, get(f"/v1/responses/{made['id']}{query}"))
        assert (status, json.loads(said)["error"]["param"]) == (400, param)


async def test_neutral_and_harmless_parameters() -> None:
    harmless: dict[str, Any] = {
        "truncation": "disabled", "service_tier": "auto", "conversation": None, "text": {"verbosity": "medium"},
        "reasoning": {"summary": "auto", "effort": None}, "include": [], "max_tool_calls": 3, "top_logprobs": 0,
        "prompt_cache_retention": "24h", "client_metadata": {"a": 1}, "tools": [], "tool_choice": "none", "stop": "z",
        "seed": 3, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1, "logit_bias": {"97": 1},
        "frequency_penalty": 0.1, "cache_salt": "s", "min_tokens": 1, "stop_token_ids": [98], "previous_response_id": None,
        "stream_options": None, "metadata": {}, "thinking_token_budget": 5, "modalities": ["text"], "context_management": [],
    }  # fmt: skip
    async with serving(saying("x")) as served:
        for name, value in harmless.items():
            status, said = await ask(served, {"input": "x", name: value}, "/v1/responses")
            assert status == 200, (name, said)


NESTED = (
    '"tools": [{"type": "function", "name": "f", "parameters": %s}]',
    '"text": {"format": {"type": "json_schema", "name": "x", "schema": %s}}',
    '"chat_template_kwargs": %s',
    '"metadata": %s',
)


async def test_what_is_nested_too_deeply_is_a_400() -> None:
    """JSON that can just be read cannot be written again below another object."""
    async with serving() as served:
        for around in NESTED:
            for depth in (100, *range(850, 1000, 6), 5000):
                nested = '{"a": ' * depth + "1" + "}" * depth
                body = f'{{"input": "x", "max_output_tokens": 2, {around % nested}}}'.encode()
                status, _, _ = await exchange(served, post("/v1/responses", body))
                assert status == (200 if depth == 100 and "metadata" not in around else 400), (around, depth)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "refusal", "summary_text", "input_image"])},
    optional={"text": json_values, "refusal": json_values, "annotations": json_values},
)
items = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["message", "function_call", "function_call_output", "reasoning", "item_reference", 3, None]
        ),
        "role": st.sampled_from(["user", "assistant", "system", "tool", None, []]),
        "content": st.text(max_size=4) | st.lists(parts, max_size=3) | json_values,
        "summary": st.lists(parts, max_size=2) | json_values,
        "output": st.text(max_size=4) | st.lists(parts, max_size=2) | json_values,
        "call_id": st.sampled_from(["1", "2"]) | json_values,
        "name": st.just("f") | json_values,
        "arguments": st.sampled_from(["{}", "[", "3", ""]) | json_values,
        "id": st.text(max_size=3) | json_values,
        "status": st.just("completed") | json_values,
    },
)
bodies = st.fixed_dictionaries(
    {"input": st.lists(items, max_size=4) | json_values},
    optional=dict.fromkeys(("model", "instructions", "previous_response_id", "max_output_tokens", "include", "tools", "tool_choice", "text", "reasoning", "store", "background", "metadata", "stream", "stream_options", "top_logprobs", "max_tool_calls"), json_values),
)  # fmt: skip


async def test_fuzzed_bodies_never_break_anything() -> None:
    sent: list[bytes] = []

    @settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck), deadline=None)
    @given(bodies)
    def collect(body: dict[str, Any]) -> None:
        sent.append(json.dumps({"max_output_tokens": 2} | body).encode("utf-8", "surrogatepass"))

    collect()
    async with serving() as served, a_stream_that_goes_on(served):
        for body in sent:
            status, _, said = await exchange(served, post("/v1/responses", body))
            assert status in (200, 400, 404), (body, said)
            if status != 200:
                assert set(json.loads(said)["error"]) == {"message", "type", "param", "code"}
