"""Images for a model that reads text only: a placeholder stands for each, and the request names
what is not read."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from tests.fakes import ByteTokenizer, FakeEngine, card
from tests.web.serving import Served, ask, exchange, get, pace, post, serving
from trouper.protocol.model import LoadedModel
from trouper.protocol.requests import ChatPrompt, Generate, Prompt, TextPrompt, ignored_parts
from trouper.protocol.sampling import SamplingDefaults
from trouper.web.anthropic.messages import CountRequest
from trouper.web.anthropic.messages import prompt_of as prompt_of_messages
from trouper.web.http.image_source import ImageParts
from trouper.web.openai.chat_completions import ChatRequest, chat_to_generate
from trouper.web.openai.other_servers import PLACEHOLDER
from trouper.web.openai.tokenize import TokenizeRequest
from trouper.web.openai.tokenize import prompt_of as prompt_of_tokenize
from trouper.web.responses.items import items_of, messages_of
from trouper.web.responses.response_request import parse_response, response_to_generate

Json = dict[str, Any]
DATA = "data:image/png;base64,iVBORw0KGgo="
IN_CHAT = {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}
IN_MESSAGES = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
IN_INPUT = {"type": "input_image", "image_url": DATA, "detail": "auto"}


def chat(messages: list[Json]) -> ChatPrompt:
    [generate] = chat_to_generate(
        ChatRequest.parse({"messages": messages}), "id", SamplingDefaults()
    )
    assert isinstance(generate.prompt, ChatPrompt)
    return generate.prompt


def messages(turns: list[Json]) -> ChatPrompt:
    return prompt_of_messages(CountRequest.parse({"messages": turns}))


def response(items: list[Json]) -> ChatPrompt:
    resolved = parse_response({"input": items})
    assert resolved.request.input is not None
    images = ImageParts()
    turns = messages_of(None, items_of(resolved.request.input, {}), images=images)
    prompt = response_to_generate(resolved, turns, "id", SamplingDefaults(), images.unread).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def contents(prompt: ChatPrompt) -> list[str]:
    return [turn["content"] for turn in prompt.messages]


def test_a_placeholder_stands_for_an_image_of_a_chat() -> None:
    parts = [{"type": "text", "text": "What is "}, IN_CHAT, {"type": "text", "text": "?"}]
    call = {"id": "c", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    seen = {"role": "tool", "tool_call_id": "c", "content": [IN_CHAT]}
    prompt = chat(
        [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]}, seen]
    )
    assert contents(prompt) == [f"What is {PLACEHOLDER}?", "", PLACEHOLDER]
    assert prompt.ignored == ("image_url",)


def test_a_placeholder_stands_for_an_image_of_a_message_and_of_a_result() -> None:
    use = {"type": "tool_use", "id": "c", "name": "Read", "input": {}}
    shown = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [{"type": "text", "text": "one"}, IN_MESSAGES],
    }
    turns: list[Json] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "See:"}, IN_MESSAGES | {"cache_control": {}}],
        },
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [shown]},
    ]
    prompt = messages(turns)
    assert contents(prompt) == [f"See:\n{PLACEHOLDER}", "", f"one\n{PLACEHOLDER}"]
    assert (
        prompt.ignored == messages(turns[1:]).ignored == messages(turns[:1]).ignored == ("image",)
    )


def test_a_placeholder_stands_for_an_image_of_an_input_and_of_an_output() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"}
    shown = {"type": "function_call_output", "call_id": "c", "output": [IN_INPUT]}
    asked = {"role": "user", "content": [{"type": "input_text", "text": "See "}, IN_INPUT]}
    prompt = response([asked, call, shown])
    assert contents(prompt) == [f"See {PLACEHOLDER}", "", PLACEHOLDER]
    assert (
        prompt.ignored
        == response([asked]).ignored
        == response([call, shown]).ignored
        == ("input_image",)
    )


def test_where_no_image_is_nothing_is_ignored() -> None:
    text = {"role": "user", "content": [{"type": "text", "text": PLACEHOLDER}]}
    spoken = {"type": "tool_result", "tool_use_id": "c", "content": "image"}
    assert chat([text, {"role": "user", "content": "image_url"}]).ignored == ()
    assert messages([text, {"role": "user", "content": [spoken]}]).ignored == ()
    written = {"role": "user", "content": [{"type": "input_text", "text": "image"}]}
    output = {"type": "function_call_output", "call_id": "c", "output": "image"}
    assert response([written, {"role": "user", "content": "image"}]).ignored == ()
    call = {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"}
    assert response([call, output]).ignored == ()
    assert prompt_of_tokenize(TokenizeRequest.parse({"messages": [text]})) == chat([text])


def test_an_image_counts_as_its_placeholder() -> None:
    turn = {"role": "user", "content": [IN_CHAT]}
    assert prompt_of_tokenize(TokenizeRequest.parse({"messages": [turn]})) == chat([turn])


def test_requests_name_what_is_ignored_once_each() -> None:
    prompts: list[Prompt] = [
        ChatPrompt((), {}, ("b", "a")),
        ChatPrompt((), {}, ("b",)),
        ChatPrompt(()),
        TextPrompt("image"),
    ]
    requests = [Generate(request_id="id", prompt=prompt) for prompt in prompts]
    assert ignored_parts(requests) == ("a", "b")
    assert ignored_parts(requests[2:]) == ()


BODIES: list[tuple[str, Json]] = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [IN_CHAT]}], "max_tokens": 2},
    ),
    ("/v1/messages", {"messages": [{"role": "user", "content": [IN_MESSAGES]}], "max_tokens": 2}),
    ("/v1/responses", {"input": [{"role": "user", "content": [IN_INPUT]}], "max_output_tokens": 2}),
    ("/v1/responses/input_tokens", {"input": [{"role": "user", "content": [IN_INPUT]}]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [IN_MESSAGES]}]}),
    ("/tokenize", {"messages": [{"role": "user", "content": [IN_CHAT]}]}),
]


async def answered(served: Served, path: str, body: Json) -> Json:
    status, found = await ask(served, body, path)
    assert status == 200, found
    answer: Json = found
    return answer


async def test_images_are_named_in_the_answer() -> None:
    """What a placeholder stands for is counted and logged as every other name that is read past
    (tests/web/test_lenient.py)."""
    async with serving() as served:
        for (path, body), name in zip(
            BODIES[:3], ("image_url", "image", "input_image"), strict=True
        ):
            status, headers, _ = await exchange(served, post(path, body))
            assert (status, headers["x-trouper-ignored"]) == (200, name), path


async def test_a_strict_server_refuses_images() -> None:
    async with serving(strict=True) as served:
        for path, body in BODIES[:3]:
            status, found = await ask(served, body, path)
            assert status == 400 and "the model reads text only" in json.dumps(found)


async def test_a_stored_input_has_the_placeholder() -> None:
    async with serving() as served:
        made = await answered(served, *BODIES[2])
        again = await answered(
            served,
            "/v1/responses",
            {"previous_response_id": made["id"], "input": "And?", "max_output_tokens": 2},
        )
    assert again["status"] == "incomplete"


class Adapted(FakeEngine):
    """Its model's chat template needs other messages."""

    async def load(self) -> LoadedModel:
        changed = attrs.evolve(
            card(), adapted_messages=(("users", "consecutive user messages become one"),)
        )
        return LoadedModel(changed, ByteTokenizer())


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        (FakeEngine(before_step=pace), {}),
        (Adapted(before_step=pace), {"users": "consecutive user messages become one"}),
    ],
)
async def test_health_names_what_is_adapted_to_the_template(
    engine: FakeEngine, changes: Json
) -> None:
    async with serving(engine) as served:
        status, _, data = await exchange(served, get("/health"))
    assert (status, json.loads(data)["adapted_messages"]) == (200, changes)
