"""The official client in strict mode: each answer is a schema check."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Literal

import openai
import pytest
import trio
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.completion_choice import CompletionChoice

from tests.web.batching import strict
from tests.web.serving import serving

MESSAGES: Any = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
]


class ChoiceInAStream(CompletionChoice):
    finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]


class CompletionInAStream(Completion):
    """The client's own type, but for `finish_reason`: it demands one, while OpenAI's API (and ours)
    sends null in the chunks before the last."""

    choices: list[ChoiceInAStream]  # type: ignore[assignment]


async def in_thread(function: Any, *arguments: Any) -> Any:
    return await trio.to_thread.run_sync(function, *arguments)


def use_every_endpoint(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert client.models.retrieve(model.id) == model
    chat = client.chat.completions.create(
        model=model.id, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2, seed=1
    )
    assert chat.usage is not None and chat.usage.completion_tokens == 5
    [choice] = chat.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 5
    assert "".join(at.token for at in choice.logprobs.content) == choice.message.content
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    check_chat_stream(client, model.id, str(choice.message.content))
    for prompt in ("ab", ["ab", "cd"], [97, 98], [[97, 98], [99]]):
        check_completions(client, model.id, prompt)


def check_chat_stream(client: openai.OpenAI, model: str, text: str) -> None:
    chunks: list[ChatCompletionChunk] = list(
        client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_completion_tokens=5,
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def check_completions(client: openai.OpenAI, model: str, prompt: Any) -> None:
    whole = client.completions.create(model=model, prompt=prompt, max_tokens=4, logprobs=2)
    assert whole.usage is not None and whole.usage.completion_tokens == 4 * len(whole.choices)
    loose = client.with_options(max_retries=0)
    loose._strict_response_validation = False
    stream: Iterable[Completion] = loose.completions.create(
        model=model, prompt=prompt, max_tokens=4, stream=True
    )
    texts = [""] * len(whole.choices)
    for chunk in stream:
        CompletionInAStream.model_validate(chunk.model_dump())
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


async def test_every_endpoint_in_strict_mode() -> None:
    async with serving() as served:
        await in_thread(use_every_endpoint, strict(served.base_url))


async def use_the_async_client(base_url: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        [model] = (await client.models.list()).data
        chat = await client.chat.completions.create(model=model.id, messages=MESSAGES, max_tokens=3)
        stream = await client.chat.completions.create(
            model=model.id, messages=MESSAGES, max_tokens=3, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == chat.choices[0].message.content
        done = await client.completions.create(model=model.id, prompt="ab", max_tokens=3)
        assert done.choices[0].finish_reason == "length"


async def test_every_endpoint_with_the_async_client() -> None:
    """In an asyncio loop of its own, as most programs run it (on Trio it leaves generators to the
    garbage collector)."""
    async with serving() as served:
        await in_thread(lambda: asyncio.run(use_the_async_client(served.base_url)))


def error_of(client: openai.OpenAI, **body: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(
            **({"model": "fake", "messages": MESSAGES, "max_tokens": 2} | body)
        )
    assert isinstance(caught.value.body, dict)
    return caught.value.status_code, caught.value.body


async def test_errors_have_four_keys_and_name_the_parameter() -> None:
    """D13: what would be ignored is refused."""
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"model": "other"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            400,
            "messages.0.content.0",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "messages.0.content"),
        ({"extra_body": {"temperature": "0"}}, 400, "temperature"),
        ({"extra_body": {"stream": "false"}}, 400, "stream"),
        ({"extra_body": {"max_tokens": True}}, 400, "max_tokens"),
        ({"extra_body": {"max_tokens": 1.5}}, 400, "max_tokens"),
        ({"temperature": 2.5}, 400, "temperature"),
        ({"top_p": -0.1}, 400, "top_p"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 10**9}, 400, "max_tokens"),
        ({"stop": [""]}, 400, "stop.0"),
        ({"stop": ["x"] * 65}, 400, "stop"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias.x"),
        ({"logit_bias": {"1": 101}}, 400, "logit_bias.1"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
        ({"n": 0}, 400, "n"),
        ({"n": 129}, 400, "n"),
        (
            {"tools": [{"type": "function", "function": {"name": "f g"}}]},
            400,
            "tools.0.function.name",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, 400, "tools"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools.0"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "sometimes",
            },
            400,
            "tool_choice",
        ),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
            400,
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "regex", "pattern": "wrong"}},
            400,
            "response_format.pattern",
        ),
        ({"extra_body": {"guided_choice": []}}, 400, "guided_choice"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, 400, "guided_choice"),
        (
            {"extra_body": {"structured_outputs": {"regex": "a", "json": {}}}},
            400,
            "structured_outputs",
        ),
        ({"extra_body": {"min_tokens": 9}, "max_tokens": 3}, 400, "min_tokens"),
        ({"extra_body": {"reasoning_effort": "very"}}, 400, "reasoning_effort"),
        ({"extra_body": {"made_up": 1}}, 400, "made_up"),
        ({"max_tokens": 10**400}, 400, "max_tokens"),
        ({"extra_body": {"temperature": 10**400}}, 400, "temperature"),
        ({"extra_body": {"top_k": 10**400}}, 400, "top_k"),
        ({"logit_bias": {"1": 10**400}}, 400, "logit_bias.1"),
        ({"logit_bias": {"01": 1}}, 400, "logit_bias.01"),
        ({"extra_body": {"stop_token_ids": {}}}, 400, "stop_token_ids"),
        ({"extra_body": {"stop_token_ids": [-1]}}, 400, "stop_token_ids.0"),
        ({"extra_body": {"stop_token_ids": [True]}}, 400, "stop_token_ids"),
        ({"extra_body": {"chat_template_kwargs": {"self": 1}}}, 400, "chat_template_kwargs.self"),
        (
            {"extra_body": {"chat_template_kwargs": {"padding": "max_length"}}},
            400,
            "chat_template_kwargs.padding",
        ),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, 400, "messages.0.name"),
        ({"messages": [{"role": "user", "content": "x", "audio": 5}]}, 400, "messages.0.audio"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "new": 1}]}]},
            400,
            "messages.0.content.0.new",
        ),
        (
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            400,
            "stream_options.include_usage",
        ),
        ({"stream": True, "stream_options": {"other": 1}}, 400, "stream_options.other"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            400,
            "stream_options.include_obfuscation",
        ),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ]

    def check(client: openai.OpenAI) -> None:
        for body, status, param in cases:
            got, error = error_of(client, **body)
            assert (got, error["param"]) == (status, param), (body, got, error)
            assert set(error) == {"message", "type", "param", "code"}

    async with serving(strict=True) as served:
        await in_thread(check, strict(served.base_url))


async def test_neutral_values_and_harmless_parameters_are_accepted() -> None:
    harmless: dict[str, Any] = {
        "n": 1,
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "seed": -(2**90),
        "logit_bias": {},
        "stop": None,
        "frequency_penalty": 0,
        "presence_penalty": 1,
        "top_logprobs": None,
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "modalities": ["text"],
    }

    def check(client: openai.OpenAI) -> None:
        for name, value in harmless.items():
            client.chat.completions.create(
                model="fake", messages=MESSAGES, max_tokens=1, extra_body={name: value}
            )

    async with serving() as served:
        await in_thread(check, strict(served.base_url))


async def test_a_seed_draws_the_same_in_any_dialect() -> None:
    """The same request twice gives the same text, streaming or not (F4 has the stop strings)."""

    def check(client: openai.OpenAI) -> None:
        texts = set()
        for stream in (False, True):
            got = client.chat.completions.create(
                model="fake",
                messages=MESSAGES,
                max_tokens=30,
                stop=["ah", "zz"],
                stream=stream,
                seed=7,
            )
            texts.add(
                "".join(c.choices[0].delta.content or "" for c in got)  # type: ignore[union-attr]
                if stream
                else got.choices[0].message.content  # type: ignore[union-attr]
            )
        assert len(texts) == 1
        assert "ah" not in str(texts.pop())

    async with serving() as served:
        await in_thread(check, strict(served.base_url))
