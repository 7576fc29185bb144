"""The official client in strict mode: each answer and each event is a schema check."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import anthropic
import attrs
import pytest
import trio
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.beta import BetaRawMessageStreamEvent
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter

from tests.fakes import EOS, ByteTokenizer, FakeEngine, FakeRow, letters
from tests.web.serving import Served, ask, eventually, exchange, get, pace, post, serving
from trouper.protocol.plans import Plan
from trouper.web.anthropic.message_dialect import COMPONENTS
from trouper.web.http.request_schema import ref

HELLO: Any = [{"role": "user", "content": "Hi"}]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BETA_EVENT: TypeAdapter[Any] = TypeAdapter(BetaRawMessageStreamEvent)
TOOL: Any = {
    "name": "look",
    "description": "Looks",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CALL = '<call>{"name": "look", "arguments": {"at": "é"}}</call>'
OTHER_CALL = '<call>{"name": "look", "arguments": {}}</call>'


@attrs.define
class Speaker(FakeEngine):
    """Says `said` to everybody."""

    said: str = ""

    def __attrs_post_init__(self) -> None:
        self.token_at = lambda key, position: (
            [*self.said.encode(), EOS][min(position, len(self.said.encode()))]
            if self.said
            else letters(key, position)
        )


class Recorder(ByteTokenizer):
    """Keeps what the chat template would get."""

    def __init__(self) -> None:
        self.seen: list[tuple[Sequence[Any], dict[str, Any]]] = []

    def encode_chat(self, messages: Sequence[Any], **kwargs: Any) -> tuple[int, ...]:
        self.seen.append((messages, kwargs))
        return super().encode_chat(messages, **kwargs)


def strict(served: Served, **options: Any) -> anthropic.Anthropic:
    url = served.base_url.removesuffix("/v1")
    defaults: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 20}
    return anthropic.Anthropic(
        base_url=url, _strict_response_validation=True, **(defaults | options)
    )


async def using(
    served: Served, function: Callable[[anthropic.Anthropic], Any], **options: Any
) -> Any:
    """In a thread, with a client of its own that leaves no connection behind."""

    def run() -> Any:
        with strict(served, **options) as client:
            return function(client)

    return await trio.to_thread.run_sync(run)


def comparable(message: Message) -> dict[str, Any]:
    """Without what differs from request to request: ids, and what a cache gave."""
    body = message.to_dict()
    for block in body["content"]:  # type: ignore[attr-defined]
        block.pop("id", None)
    body.pop("stop_details", None)
    usage: Any = body.pop("usage")
    prompt = (
        usage["input_tokens"]
        + usage["cache_read_input_tokens"]
        + usage["cache_creation_input_tokens"]
    )
    return body | {"id": "", "prompt": prompt, "output_tokens": usage["output_tokens"]}


@cache
def described(name: str) -> Draft202012Validator:
    """As /openapi.json has it."""
    return Draft202012Validator({"components": {"schemas": COMPONENTS}, **ref(name)})


def thinking(text: str) -> dict[str, str]:
    return {"type": "thinking", "thinking": text}


def text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def use(**input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "name": "look", "input": input}


ANSWERS: list[tuple[str, dict[str, Any], list[dict[str, Any]], str]] = [
    ("Hello\n\nyou", {}, [text("Hello\n\nyou")], "end_turn"),
    ("", {"max_tokens": 0}, [], "max_tokens"),
    ("Hello", {"max_tokens": 3}, [text("Hel")], "max_tokens"),
    ("abcdefg", {"stop_sequences": ["x", "de"]}, [text("abc")], "stop_sequence"),
    ("<think>\nhm\nhm</think>\n\nYes", {}, [thinking("hm\nhm"), text("Yes")], "end_turn"),
    ("<think></think>\n\nYes", {}, [text("Yes")], "end_turn"),
    ("<think> hm\n</think>Yes", {}, [thinking(" hm"), text("Yes")], "end_turn"),
    ("<think>for ever", {"max_tokens": 12}, [thinking("for e")], "max_tokens"),
    ("<think>a</think>\n<think>b</think>", {}, [thinking("a\nb")], "end_turn"),
    (" \n", {}, [text(" \n")], "end_turn"),
    (f"\n{CALL}\n{OTHER_CALL}\n", {"tools": [TOOL]}, [use(at="é"), use()], "tool_use"),
    (
        f"<think>hm</think>I look.\n{CALL}\n\nSo:\n\n1",
        {"tools": [TOOL]},
        [thinking("hm"), text("I look."), use(at="é"), text("So:\n\n1")],
        "tool_use",
    ),
    (
        f"{CALL}{OTHER_CALL}",
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        [use(at="é")],
        "tool_use",
    ),
    (CALL, {"tools": [TOOL], "tool_choice": {"type": "none"}}, [text(CALL)], "end_turn"),
    (CALL[6:-7], {"tools": [TOOL], "tool_choice": {"type": "any"}}, [use(at="é")], "tool_use"),
    (
        CALL[6:-7],
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}},
        [use(at="é")],
        "tool_use",
    ),
    (
        CALL[6:-7],
        {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 9},
        [],
        "max_tokens",
    ),
    ("<call>[]</call>", {"tools": [TOOL]}, [text("<call>[]</call>")], "end_turn"),
    (
        '{"a": "<think>"}',
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        [text('{"a": "<think>"}')],
        "end_turn",
    ),
]


def check_answer(
    client: anthropic.Anthropic, body: dict[str, Any], blocks: list[dict[str, Any]], reason: str
) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": HELLO, "max_tokens": 1000} | body
    whole = client.messages.create(**asked)
    described("AnthropicMessage").validate(whole.to_dict())
    found = [block.to_dict() for block in whole.content]
    for block in found:
        assert block.pop("signature", "none") != ""
        assert str(block.pop("id", "toolu_")).startswith("toolu_")
    assert (found, whole.stop_reason) == (blocks, reason)
    assert (whole.stop_sequence is not None) == (reason == "stop_sequence")
    with client.messages.stream(**asked) as stream:
        events = [event.type for event in stream]
        assert comparable(stream.get_final_message()) == comparable(whole)
    assert (events[0], events[-2:]) == ("message_start", ["message_delta", "message_stop"])
    raw = list(client.messages.create(**asked, stream=True))
    for event in raw:
        EVENT.validate_python(event.to_dict())
        described("AnthropicEvent").validate(event.to_dict())
    assert raw[0].message.usage.output_tokens == 0
    starts = [event.index for event in raw if event.type == "content_block_start"]
    assert (
        starts
        == [event.index for event in raw if event.type == "content_block_stop"]
        == [*range(len(blocks))]
    )


async def test_whole_and_streamed() -> None:
    engine = Speaker()

    def check(client: anthropic.Anthropic) -> None:
        for said, body, blocks, reason in ANSWERS:
            engine.said = said
            check_answer(client, body, blocks, reason)

    async with serving(engine) as served:
        await using(served, check)


async def test_thinking_that_is_not_shown_is_carried_by_its_signature() -> None:
    engine = Speaker(said="<think>hm</think>Yes", tokenizer=Recorder())

    def check(client: anthropic.Anthropic) -> None:
        asked: Any = {
            "model": "fake",
            "max_tokens": 99,
            "thinking": {"type": "adaptive", "display": "omitted"},
        }
        whole = client.messages.create(messages=HELLO, **asked)
        with client.messages.stream(messages=HELLO, **asked) as stream:
            kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
            assert comparable(stream.get_final_message()) == comparable(whole)
        assert kinds[0] == "signature_delta" and set(kinds[1:]) == {"text_delta"}
        first, _ = whole.content
        assert first.type == "thinking" and first.thinking == "" and first.signature
        client.messages.create(messages=[*HELLO, whole.to_param(), *HELLO], **asked)

    async with serving(engine) as served:
        await using(served, check)
    assert isinstance(engine.tokenizer, Recorder)
    turns, _ = engine.tokenizer.seen[-1]
    assert turns[1] == {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}


async def test_what_a_coding_agent_sends() -> None:
    """System prompts as arrays whose first block has a hash of each request, caching, betas,
    results of tools."""
    caching = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    asked: Any = {
        "model": "fake",
        "max_tokens": 32_000,
        "betas": ["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        "system": [
            text("x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"),
            text("You help.") | caching,
            text("Be brief."),
        ],
        "messages": [
            {"role": "user", "content": [text("<reminder>"), text("Fix it.") | caching]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "of somebody else"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    text("I look.") | {"citations": None},
                    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "é"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [text("a"), text("b")],
                    },
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": "not there",
                        "is_error": True,
                    }
                    | caching,
                    {"type": "tool_result", "tool_use_id": "unknown"},
                    text("Well?"),
                ],
            },
            {"role": "user", "content": "And?"},
        ],
        "tools": [
            TOOL | caching | {"eager_input_streaming": True},
            TOOL | {"name": "Bash", "type": "custom"},
        ],
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "max"},
        "cache_control": {"type": "ephemeral"},
    }
    engine = Speaker(said="Done.", tokenizer=Recorder())

    def check(client: anthropic.Anthropic) -> None:
        whole = client.beta.messages.create(**asked)
        assert (whole.content[0].to_dict(), whole.stop_reason) == (text("Done."), "end_turn")
        for event in client.beta.messages.create(**asked, stream=True):
            BETA_EVENT.validate_python(event.to_dict())
        unknown = ("max_tokens", "metadata")
        counted = client.beta.messages.count_tokens(
            **{name: asked[name] for name in asked if name not in unknown}
        )
        usage = whole.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)

    async with serving(engine) as served:
        await using(served, check)
    assert isinstance(engine.tokenizer, Recorder)
    seen = engine.tokenizer.seen
    assert seen[0] == seen[1] == seen[2]
    turns, kwargs = seen[0]
    assert kwargs.pop("tools") == [
        {
            "type": "function",
            "function": {"name": name, "description": "Looks", "parameters": TOOL["input_schema"]},
        }
        for name in ("look", "Bash")
    ]
    assert kwargs == {"enable_thinking": True, "reasoning_effort": "high"}
    call = {
        "type": "function",
        "id": "toolu_1",
        "function": {"name": "look", "arguments": {"at": "é"}},
    }
    other = {"type": "function", "id": "toolu_2", "function": {"name": "look", "arguments": {}}}
    assert list(turns) == [
        {"role": "system", "content": "You help.\nBe brief."},
        {"role": "user", "content": "<reminder>\nFix it."},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [call, other],
            "reasoning_content": "hm",
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: not there"},
        {"role": "tool", "tool_call_id": "unknown", "content": ""},
        {"role": "user", "content": "Well?\nAnd?"},
    ]


@pytest.mark.parametrize(
    ("thinking", "wanted", "most"),
    [
        (None, False, None),
        ({"type": "disabled"}, False, 0),
        ({"type": "adaptive"}, True, None),
        ({"type": "enabled", "budget_tokens": 1024}, True, 1024),
    ],
)
async def test_how_much_is_thought(thinking: Any, wanted: bool, most: int | None) -> None:
    engine = Speaker(said="x", tokenizer=Recorder())
    async with serving(engine) as served:
        body = {"messages": HELLO, "max_tokens": 2000, "thinking": thinking}
        assert (await ask(served, body, "/v1/messages"))[0] == 200
    [admit] = [admit for plan in engine.plans_seen for admit in plan.admit]
    assert (admit.thinking.tokens if admit.thinking else None) == most
    assert isinstance(engine.tokenizer, Recorder)
    assert engine.tokenizer.seen[0][1] == {"enable_thinking": wanted}


async def test_an_answer_goes_on_where_the_last_message_ends() -> None:
    engine = Speaker(said="B)", tokenizer=Recorder())

    def check(client: anthropic.Anthropic) -> None:
        for said in ("The answer is (", ""):
            client.messages.create(
                model="fake",
                max_tokens=9,
                messages=[*HELLO, {"role": "assistant", "content": said}],
            )

    async with serving(engine) as served:
        await using(served, check)
    assert isinstance(engine.tokenizer, Recorder)
    [(turns, kwargs), (others, free)] = engine.tokenizer.seen
    assert turns[-1] == {"role": "assistant", "content": "The answer is ("}
    assert kwargs == {
        "enable_thinking": False,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert (list(others), free) == (HELLO, {"enable_thinking": False}), "an empty one is none"


async def test_usage_tells_the_cache_apart_and_the_count_is_exact() -> None:
    def check(client: anthropic.Anthropic) -> None:
        asked: Any = {"model": "fake", "messages": [{"role": "user", "content": "long " * 200}]}
        counted = client.messages.count_tokens(**asked).input_tokens
        first = client.messages.create(max_tokens=4, **asked).usage
        assert (first.input_tokens, first.cache_read_input_tokens, first.output_tokens) == (
            counted,
            0,
            4,
        )
        with client.messages.stream(max_tokens=4, **asked) as stream:
            again = stream.get_final_message().usage
        cached = again.cache_read_input_tokens or 0
        assert cached > 900 and again.input_tokens + cached == counted

    async with serving() as served:
        await using(served, check)


async def test_more_tokens_than_there_is_room_for_are_all_there_is() -> None:
    """Agents always ask for as much as the largest models give."""

    def check(client: anthropic.Anthropic) -> None:
        asked: Any = {
            "model": "fake",
            "messages": HELLO,
            "max_tokens": 64_000,
            "extra_body": {"ignore_eos": True},
        }
        whole = client.messages.create(**asked)
        assert whole.stop_reason == "model_context_window_exceeded"
        assert whole.usage.input_tokens + whole.usage.output_tokens == 200
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
            client.messages.create(
                model="fake", max_tokens=1, messages=[{"role": "user", "content": "x" * 200}]
            )

    async with serving(settings={"max_kv_size": 200}) as served:
        await using(served, check)


async def use_the_async_client(url: str) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        asked: Any = {"model": "fake", "messages": HELLO, "max_tokens": 30}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            pieces = [piece async for piece in stream.text_stream]
        assert len(pieces) > 1 and [block.to_dict() for block in whole.content] == [
            text("".join(pieces))
        ]
        assert (await client.messages.count_tokens(model="fake", messages=HELLO)).input_tokens > 0


async def test_the_async_client() -> None:
    async with serving() as served:
        url = served.base_url.removesuffix("/v1")
        await trio.to_thread.run_sync(lambda: asyncio.run(use_the_async_client(url)))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages.0"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": [], "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
    (
        {"messages": [{"role": "user", "content": [{"type": "search_result", "source": {}}]}]},
        "'search_result'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "'document'",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x"}]}]}, "'tool_use'"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
        "'server_tool_use'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
        "messages.0.content.0.text",
    ),
    (
        {"messages": [{"role": "user", "content": [text("x") | {"citations": [{}]}]}]},
        "messages.0.content.0.citations",
    ),
    (
        {"messages": [{"role": "user", "content": [text("x") | {"new": 1}]}]},
        "messages.0.content.0.new",
    ),
    ({"messages": [{"role": "user", "content": "\udc00"}]}, "surrogate"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "x",
                            "content": [{"type": "document"}],
                        }
                    ],
                }
            ]
        },
        "messages.0.content.0.content.0",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "x", "is_error": 1}],
                }
            ]
        },
        "messages.0.content.0.is_error",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages.0.content.0.tool_use_id",
    ),
    (
        {
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "x", "name": "y", "input": []}],
                },
            ]
        },
        "messages.1.content.0.input",
    ),
    (
        {
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "x", "name": "y", "input": {}}],
                },
            ]
        },
        "messages",
    ),
    ({"system": 3}, "system"),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "3"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"temperature": "0"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 10**400}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x" * 513]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"metadata": {"user_id": 3}}, "metadata.user_id"),
    ({"metadata": {"other": 3}}, "metadata.other"),
    ({"metadata": []}, "metadata"),
    ({"tools": {}}, "tools"),
    ({"tools": [3]}, "tools.0"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
    ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "tools.0.input_schema"),
    ({"tools": [TOOL | {"input_schema": {"type": "string", "$ref": "#"}}]}, "tools.0.input_schema"),
    ({"tools": [TOOL | {"input_schema": {}}]}, "tools.0.input_schema"),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools.0.name"),
    ({"tools": [TOOL | {"description": 3}]}, "tools.0.description"),
    ({"tools": [TOOL | {"strict": 1}]}, "tools.0.strict"),
    ({"tools": [TOOL | {"defer_loading": 1}]}, "tools.0.defer_loading"),
    ({"tools": [TOOL | {"new": True}]}, "tools.0.new"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [TOOL]}, "tool_choice.name"),
    ({"tool_choice": {"type": "none", "name": "other"}, "tools": [TOOL]}, "tool_choice.name"),
    (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "no"}, "tools": [TOOL]},
        "tool_choice.disable_parallel_tool_use",
    ),
    ({"thinking": True}, "thinking"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000},
        "thinking.budget_tokens",
    ),
    ({"thinking": {"type": "adaptive", "budget_tokens": 2000}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "updates"}}, "thinking.display"),
    (
        {
            "thinking": {"type": "enabled", "budget_tokens": 2000},
            "max_tokens": 3000,
            "tools": [TOOL],
            "tool_choice": {"type": "any"},
        },
        "thinking",
    ),
    ({"output_config": {"effort": "none"}}, "output_config.effort"),
    ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
    ({"output_config": {"format": {"type": "regex"}}}, "output_config.format"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": "x"}}},
        "output_config.format.schema",
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {}, "name": "x"}}},
        "output_config.format.name",
    ),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    (
        {
            "output_format": {"type": "json_schema", "schema": {}},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
        "output_format",
    ),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits.0",
    ),
    (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
        "context_management.edits.0",
    ),
    ({"context_management": {"edits": 3}}, "context_management.edits"),
    ({"context_management": {"new": 3}}, "context_management.new"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"speed": "fast"}, "speed"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    ({"cache_salt": "x" * 2000}, "cache_salt"),
    ({"cache_salt": "\udc00"}, "surrogate"),
    ({"made_up": 1}, "made_up"),
]


async def test_what_would_be_ignored_is_refused_by_name() -> None:
    """D13. In Anthropic's shape, which has no field for the parameter: the message names it."""
    async with serving(strict=True) as served:
        for change, named in WRONG:
            body = {"model": "fake", "messages": HELLO, "max_tokens": 2} | change
            status, said = await ask(served, body, "/v1/messages")
            assert (status, said["type"], said["error"]["type"]) == (
                400,
                "error",
                "invalid_request_error",
            ), change
            assert named in said["error"]["message"], (change, said)
            place, _, fault = said["error"]["message"].partition(": ")
            assert not place.startswith(fault.partition(":")[0] + "."), "the place is said twice"
            described("AnthropicError").validate(said)
            if not change.keys() & {"max_tokens", "cache_salt"}:
                status, said = await ask(served, body, "/v1/messages/count_tokens")
                assert status == 400 or not change.keys() & {
                    "messages",
                    "system",
                    "tools",
                    "thinking",
                    "made_up",
                }, said


HARMLESS: list[dict[str, Any]] = [
    {"service_tier": "auto"},
    {"service_tier": "standard_only"},
    {"speed": "standard"},
    {"mcp_servers": []},
    {"metadata": {"user_id": None}},
    {"metadata": None},
    {"container": None},
    {"tools": []},
    {"stop_sequences": []},
    {"tool_choice": {"type": "auto"}},
    {"context_management": {"edits": []}},
    {"fallbacks": "default"},
    {"diagnostics": {"previous_message_id": None}},
    {"thinking": {"type": "disabled"}},
    {"system": ""},
    {"output_config": {}},
    {"output_config": {"effort": "low"}},
    {"seed": 3},
    {"min_p": 0.1},
    {"top_k": 5},
    {"cache_salt": "me"},
    {"chat_template_kwargs": {"any": 1}},
    {"temperature": 0},
    {"top_p": 1},
    {"tools": [TOOL | {"allowed_callers": ["direct"], "defer_loading": False, "strict": True}]},
    {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
    {"messages": [*HELLO, {"role": "system", "content": "Now be kind."}, *HELLO]},
    {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
]


async def test_what_asks_for_nothing_or_is_ours_is_taken() -> None:
    versions = "anthropic-version: 2023-06-01\r\nanthropic-beta: a,b\r\n"
    async with serving() as served:
        for change in HARMLESS:
            body = {"messages": HELLO, "max_tokens": 2} | change
            status, said = await ask(served, body, "/v1/messages?beta=true", versions)
            assert status == 200, (change, said)
            status, said = await ask(served, body, "/v1/messages/count_tokens?beta=true", versions)
            assert (status, set(said)) == (200, {"input_tokens"}), (change, said)


BODY: Any = {"messages": HELLO, "max_tokens": 4000, "ignore_eos": True}


def error_of(client: anthropic.Anthropic, **body: Any) -> anthropic.APIStatusError:
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**({"model": "fake", "messages": HELLO, "max_tokens": 2} | body))
    return caught.value


async def test_errors_of_the_edge_are_in_its_shape() -> None:
    def check(client: anthropic.Anthropic) -> None:
        for error, status, kind in (
            (error_of(client.with_options(api_key="wrong")), 401, "authentication_error"),
            (error_of(client, model="other"), 404, "not_found_error"),
            (
                error_of(client, messages=[{"role": "user", "content": "x" * 3000}]),
                413,
                "request_too_large",
            ),
            (error_of(client, messages=[]), 400, "invalid_request_error"),
        ):
            assert (error.status_code, error.type) == (status, kind)
            assert isinstance(error.body, dict) and error.body["type"] == "error"
            assert (
                error.request_id
                == error.body["request_id"]
                == error.response.headers["x-request-id"]
            )

    async with serving(model_alias=("off",), api_key=("k",), max_body_bytes=2000) as served:
        await using(served, check, api_key="k")
        key = "X-Api-Key: k\r\n"
        for request, status, kind in (
            (post("/v1/messages", b"{", key), 400, "invalid_request_error"),
            (post("/v1/messages", b"[]", key), 400, "invalid_request_error"),
            (post("/v1/messages/batches", b"{}", key), 404, "not_found_error"),
            (get("/v1/messages", key), 405, "invalid_request_error"),
            (get("/v1/messages/count_tokens", key), 405, "invalid_request_error"),
        ):
            await check_error(served, request, status, kind)
        assert "param" in (await ask(served, {}, "/v1/messagesx", key))[1]["error"], (
            "OpenAI's shape elsewhere"
        )
    async with serving(body_timeout_s=0.05) as served:
        half = post("/v1/messages", b"{}").replace(b"Content-Length: 2", b"Content-Length: 9")
        await check_error(served, half, 408, "timeout_error")


async def check_error(served: Served, request: bytes, status: int, kind: str) -> None:
    got, headers, body = await exchange(served, request)
    said = json.loads(body)
    assert (got, said["error"]["type"], said["request_id"]) == (status, kind, headers["request-id"])


async def test_a_full_queue_and_a_server_that_drains() -> None:
    tight = {"completion_batch_size": 1, "max_queue_size": 1}
    async with (
        serving(settings=tight) as served,
        await served.connect() as one,
        await served.connect() as two,
    ):
        for waiting, stream in enumerate((one, two), 1):
            await stream.send_all(post("/v1/messages", BODY | {"stream": True}))
            await eventually(lambda waiting=waiting: served.busy == waiting)  # type: ignore[misc]
        error = await using(served, error_of)
        assert (error.status_code, error.type, error.response.headers["retry-after"]) == (
            429,
            "rate_limit_error",
            "1",
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.runtime.drain, 60)
            await eventually(lambda: served.runtime.draining)
            error = await using(served, error_of)
            assert (error.status_code, error.type) == (503, "overloaded_error")
            await one.aclose()
            await two.aclose()


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    """And with nothing that a whole message has at its end."""

    def dies(rows: Sequence[FakeRow]) -> bool:
        return any(row.position == 5 for row in rows)

    def check(client: anthropic.Anthropic) -> None:
        events: list[RawMessageStreamEvent] = []
        with pytest.raises(anthropic.APIStatusError) as caught:
            events.extend(
                client.messages.create(model="fake", messages=HELLO, max_tokens=50, stream=True)
            )
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        assert caught.value.body["error"]["details"] == {"error_code": "request_crashes_engine"}
        assert caught.value.body["request_id"] == caught.value.request_id
        assert events and events[-1].type not in ("message_delta", "message_stop")
        error = error_of(client, max_tokens=50)
        assert (error.status_code, error.type) == (422, "invalid_request_error")

    async with serving(FakeEngine(before_step=pace, dies=dies)) as served:
        await using(served, check)


async def test_a_silent_stream_pings() -> None:
    """And goes on behind it."""
    patience = trio.Event()

    async def before(plan: Plan) -> None:
        if plan.step > 2:
            await patience.wait()

    async with (
        serving(FakeEngine(before_step=before), heartbeat_s=0.05) as served,
        await served.connect() as stream,
    ):
        await stream.send_all(
            post("/v1/messages", {"messages": HELLO, "max_tokens": 5, "stream": True})
        )
        received = b""
        with trio.fail_after(20):
            while received.count(b'event: ping\ndata: {"type":"ping"}\n\n') < 2:
                received += await stream.receive_some()
            patience.set()
            while b"event: message_stop" not in received:
                received += await stream.receive_some()
        assert received.index(b"event: message_start") < received.index(b"event: ping")


async def test_a_message_is_cancelled_by_its_id() -> None:
    async with serving() as served, trio.open_nursery() as nursery:
        nursery.start_soon(exchange, served, post("/v1/messages", BODY, "X-Request-Id: mine\r\n"))
        await eventually(lambda: served.busy == 1)
        assert (await ask(served, {}, "/v1/requests/msg_mine/cancel"))[0] == 200
        await eventually(lambda: served.busy == 0)


async def test_a_thread_is_refused_in_the_words_after_which_the_client_repeats_without_it() -> None:
    async with serving(FakeEngine()) as served:
        asked = {"model": "any", "max_tokens": 5, "messages": HELLO, "thread": {"type": "create"}}
        status, answer = await ask(served, asked, "/v1/messages")
        error = answer["error"]
        assert (status, error["details"]["error_code"]) == (400, "thread_unsupported_request")
        assert "thread" in error["message"]


async def test_the_models_are_listed_for_this_client_too() -> None:
    def check(client: anthropic.Anthropic) -> None:
        [listed] = client.models.list()
        assert (listed.id, listed.type, listed.lifecycle) == (
            listed.display_name,
            "model",
            "active",
        )
        assert listed.created_at.tzinfo is not None
        assert (listed.max_input_tokens, listed.max_tokens) == (100, 100)
        assert client.models.retrieve(listed.id) == listed
        assert [model.id for model in client.models.list(limit=1)] == [listed.id]

    async with serving(FakeEngine(), {"max_kv_size": 100}) as served:
        await using(served, check)


async def test_the_async_client_lists_models_page_by_page() -> None:
    async def pages(url: str) -> list[str]:
        async with anthropic.AsyncAnthropic(
            base_url=url, api_key="-", _strict_response_validation=True
        ) as client:
            return [model.id async for model in client.models.list(limit=1)]

    async with serving(FakeEngine()) as served:
        url = served.base_url.removesuffix("/v1")
        assert len(await trio.to_thread.run_sync(lambda: asyncio.run(pages(url)))) == 1
