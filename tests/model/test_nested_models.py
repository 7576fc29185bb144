"""Three nested pydantic models, two of them recursive, as a forced tool and as a response format,
in three dialects, by the official clients, streamed and not, on the embedded model. A schema of
pydantic's has `$ref` and `$defs`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
import trio

from tests.family_configs import LONG
from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.web.server import serve_http

MODEL = "SmolLM2-135M-Instruct"
TOKENS = 200
TRIP = {
    "by": "train",
    "to": {"city": "Paris", "at": {"part": "day", "known": True}, "near": None},
    "then": {
        "by": "ship",
        "to": {"city": "Rome", "at": {"part": "night", "known": False}, "near": None},
        "then": None,
    },
}
ARGUMENTS, CALL = json.dumps(TRIP), json.dumps({"name": "Trip", "arguments": TRIP})
REPEAT = "Repeat this JSON exactly and say nothing else:\n\n{}"
"""Left to itself a small model nests for ever; what it shall say must end."""


class Time(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    part: Literal["day", "night"]
    known: bool


class Place(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    at: Time
    near: Place | None


class Trip(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    by: Literal["train", "ship"]
    to: Place
    then: Trip | None


class Weather(pydantic.BaseModel):
    """Another tool, whose definitions have the same names and are others."""

    class Time(pydantic.BaseModel):
        hour: Literal[1, 2]

    at: Time
    next: Weather | None


def said(text: str) -> Any:
    return [{"role": "user", "content": REPEAT.format(text)}]


def called(name: str, arguments: object) -> Trip | Weather:
    return Trip.model_validate(arguments) if name == "Trip" else Weather.model_validate(arguments)


def chat_tool(client: openai.OpenAI, *, stream: bool, choice: Any = "required") -> Trip | Weather:
    tools = [openai.pydantic_function_tool(Trip), openai.pydantic_function_tool(Weather)]
    asked: Any = {
        "model": MODEL,
        "messages": said(CALL),
        "tools": tools,
        "tool_choice": choice,
    }
    if stream:
        with client.chat.completions.stream(max_tokens=TOKENS, temperature=0, **asked) as events:
            whole = events.get_final_completion()
    else:
        whole = client.chat.completions.parse(max_tokens=TOKENS, temperature=0, **asked)
    [call] = whole.choices[0].message.tool_calls or []
    assert whole.choices[0].finish_reason == "tool_calls"
    assert call.function.parsed_arguments is not None
    return called(call.function.name, json.loads(call.function.arguments))


def chat_named_tool(client: openai.OpenAI, *, stream: bool) -> Trip | Weather:
    return chat_tool(
        client, stream=stream, choice={"type": "function", "function": {"name": "Trip"}}
    )


def chat_format(client: openai.OpenAI, *, stream: bool) -> Trip | Weather:
    asked: Any = {"model": MODEL, "messages": said(ARGUMENTS), "response_format": Trip}
    if stream:
        with client.chat.completions.stream(max_tokens=TOKENS, temperature=0, **asked) as events:
            whole = events.get_final_completion()
    else:
        whole = client.chat.completions.parse(max_tokens=TOKENS, temperature=0, **asked)
    parsed = whole.choices[0].message.parsed
    assert isinstance(parsed, Trip)
    return parsed


def responses_tool(client: openai.OpenAI, *, stream: bool) -> Trip | Weather:
    tools = [openai.pydantic_function_tool(kind)["function"] for kind in (Trip, Weather)]
    flat: Any = [{"type": "function", **tool} for tool in tools]
    asked: Any = {
        "model": MODEL,
        "input": said(CALL),
        "max_output_tokens": TOKENS,
        "temperature": 0,
        "tools": flat,
    }
    if stream:
        *_, last = client.responses.create(tool_choice="required", stream=True, **asked)
        assert last.type == "response.completed"
        [call] = last.response.output
    else:
        [call] = client.responses.create(tool_choice="required", **asked).output
    assert call.type == "function_call"
    return called(call.name, json.loads(call.arguments))


def responses_format(client: openai.OpenAI, *, stream: bool) -> Trip | Weather:
    asked: Any = {
        "model": MODEL,
        "input": said(ARGUMENTS),
        "max_output_tokens": TOKENS,
        "temperature": 0,
        "text_format": Trip,
    }
    if stream:
        with client.responses.stream(**asked) as events:
            parsed = events.get_final_response().output_parsed
    else:
        parsed = client.responses.parse(**asked).output_parsed
    assert isinstance(parsed, Trip)
    return parsed


def messages_tool(
    client: anthropic.Anthropic, *, stream: bool, choice: Any = None
) -> Trip | Weather:
    tools = [
        {"name": kind.__name__, "input_schema": kind.model_json_schema()}
        for kind in (Trip, Weather)
    ]
    asked: Any = {
        "model": MODEL,
        "max_tokens": TOKENS,
        "messages": said(CALL),
        "tools": tools,
        "tool_choice": choice or {"type": "any"},
        "extra_body": {"temperature": 0},
    }
    if stream:
        with client.messages.stream(**asked) as events:
            whole = events.get_final_message()
    else:
        whole = client.messages.create(**asked)
    [call] = whole.content
    assert whole.stop_reason == "tool_use" and call.type == "tool_use"
    return called(call.name, call.input)


def messages_named_tool(client: anthropic.Anthropic, *, stream: bool) -> Trip | Weather:
    return messages_tool(client, stream=stream, choice={"type": "tool", "name": "Trip"})


def messages_format(client: anthropic.Anthropic, *, stream: bool) -> Trip | Weather:
    asked: Any = {
        "model": MODEL,
        "max_tokens": TOKENS,
        "messages": said(ARGUMENTS),
        "output_format": Trip,
        "extra_body": {"temperature": 0},
    }
    if stream:
        with client.messages.stream(**asked) as events:
            parsed = events.get_final_message().parsed_output
    else:
        parsed = client.messages.parse(**asked).parsed_output
    assert isinstance(parsed, Trip)
    return parsed


BY_OPENAI = (
    chat_tool,
    chat_format,
    responses_tool,
    responses_format,
    *((chat_named_tool,) if LONG else ()),
)
BY_ANTHROPIC = (messages_tool, messages_format, *((messages_named_tool,) if LONG else ()))


@pytest.mark.long
async def test_in_three_dialects_by_the_official_clients() -> None:
    """All at once: they are rows of one batch. Greedy, so a stream says the same as a whole
    answer."""
    answers: dict[tuple[str, bool], Trip | Weather] = {}

    async def ask(client: Any, way: Callable[..., Trip | Weather], *, stream: bool) -> None:
        answers[way.__name__, stream] = await trio.to_thread.run_sync(
            partial(way, client, stream=stream)
        )

    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(run_runtime, Settings(no_ssd=True))
        [url] = await nursery.start(
            partial(serve_http, runtime, ServerSettings(port=0), shutdown=shutdown)
        )
        common: Any = {"api_key": "none", "max_retries": 0, "timeout": 300}
        with (
            openai.OpenAI(base_url=f"{url}/v1", **common) as one,
            anthropic.Anthropic(base_url=url, **common) as other,
        ):
            async with trio.open_nursery() as asking:
                for stream in (False, True):
                    for client, ways in ((one, BY_OPENAI), (other, BY_ANTHROPIC)):
                        for way in ways:
                            asking.start_soon(partial(ask, client, way, stream=stream))
        await runtime.drain(10)
        shutdown.set()
    assert len(answers) == 2 * len((*BY_OPENAI, *BY_ANTHROPIC))
    for way in (*BY_OPENAI, *BY_ANTHROPIC):
        assert answers[way.__name__, True] == answers[way.__name__, False], way
    assert any(
        isinstance(answer, Trip) and answer.then is not None for answer in answers.values()
    ), "it went deeper"
