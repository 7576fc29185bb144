"""Custom tools, and tools and choices of other servers, in chat."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import openai
import pytest
from openai.types.chat import ChatCompletionToolChoiceOptionParam, ChatCompletionToolUnionParam

from tests.web.responses import by_client, prompts_of, saying
from tests.web.serving import Served, exchange, post, serving
from tests.web.test_response_tool_types import called, hermes

Json = dict[str, Any]
PATH, HEADER = "/v1/chat/completions", "x-trouper-ignored"
USER: Json = {"role": "user", "content": "x"}
FUNCTION: Json = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GRAMMAR: Json = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
CUSTOM: Json = {"type": "custom", "custom": {"name": "write it", "description": "Writes."}}
CHOSEN: Json = {"type": "custom", "custom": {"name": "write it"}}


async def asked(served: Served, **body: Any) -> tuple[int, str, Json]:
    status, headers, data = await exchange(served, post(PATH, {"messages": [USER]} | body))
    return status, headers.get(HEADER, ""), json.loads(data)


def test_every_type_of_the_package_is_known() -> None:
    kinds = {
        get_args(get_type_hints(member)["type"])[0]
        for member in get_args(ChatCompletionToolUnionParam)
    }
    assert kinds == {FUNCTION["type"], CUSTOM["type"]}
    choices = {
        getattr(member, "__name__", "") for member in get_args(ChatCompletionToolChoiceOptionParam)
    } - {"Literal"}
    assert choices == {
        "ChatCompletionAllowedToolChoiceParam",
        "ChatCompletionNamedToolChoiceParam",
        "ChatCompletionNamedToolChoiceCustomParam",
    }


async def test_calls_of_custom_tools_and_their_way_back() -> None:
    engine = saying(
        called("write_it", input='a "b"\n'),
        called("write_it", input='a "b"\n'),
        "Done.",
        tokenizer=hermes(),
    )

    def use(client: openai.OpenAI) -> tuple[Json, str, str]:
        # Its chunks know functions only.
        client = client.copy(_extra_kwargs={"_strict_response_validation": False})
        request: Any = {"model": "fake", "messages": [USER], "tools": [CUSTOM, FUNCTION]}
        [choice] = client.chat.completions.create(**request).choices
        deltas = [
            chunk.choices[0].delta.to_dict()
            for chunk in client.chat.completions.create(**request, stream=True)
        ]
        calls: list[Any] = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert choice.finish_reason == "tool_calls" and {call["index"] for call in calls} == {0}
        return (
            choice.message.to_dict(),
            calls[0]["type"],
            "".join(call["custom"]["input"] for call in calls),
        )

    async with serving(engine) as served:
        message, kind, streamed = await by_client(served, use)
        [call] = message["tool_calls"]
        assert (call["type"], call["custom"]) == (
            "custom",
            {"name": "write it", "input": 'a "b"\n'},
        )
        assert (kind, streamed) == ("custom", 'a "b"\n')
        again = [USER, message, {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
        assert (await asked(served, messages=again, tools=[CUSTOM]))[:2] == (200, "")
    [_, turn, _] = json.loads(prompts_of(engine)[-1])[0]
    assert turn["tool_calls"][0]["function"] == {
        "name": "write_it",
        "arguments": {"input": 'a "b"\n'},
    }


async def test_a_forced_custom_tool_has_its_grammar() -> None:
    engine = saying("abc", tokenizer=hermes())
    tool = {"type": "custom", "custom": CUSTOM["custom"] | {"format": GRAMMAR}}
    async with serving(engine) as served:
        _, _, answer = await asked(served, tools=[tool, FUNCTION], tool_choice=CHOSEN)
        [call] = answer["choices"][0]["message"]["tool_calls"]
        assert call["custom"] == {"name": "write it", "input": "abc"}


async def test_what_nobody_runs_here_is_left_out_and_named() -> None:
    async with serving(saying("Hi", tokenizer=hermes())) as served:
        for tool, name in (
            ({"type": "web_search"}, "web_search"),
            ({"google_search": {}}, "google_search"),
        ):
            assert (await asked(served, tools=[tool, FUNCTION]))[:2] == (200, f"tools.{name}")
            assert (await asked(served, tools=[tool], tool_choice="auto"))[:2] == (
                200,
                f"tools.{name}",
            )
            assert (await asked(served, tools=[tool], tool_choice="required"))[0] == 400


@pytest.mark.parametrize(
    "choice",
    [
        "any",
        {"type": "auto"},
        {"type": "any"},
        {"type": "function", "name": "f"},
        {"type": "tool", "name": "f"},
        {"function": {"name": "f"}},
        CHOSEN,
        {"type": "custom", "name": "write it"},
    ],
)
async def test_choices_in_every_form(choice: Any) -> None:
    async with serving(saying(called("f"), tokenizer=hermes())) as served:
        assert (await asked(served, tools=[FUNCTION, CUSTOM], tool_choice=choice))[0] == 200


@pytest.mark.parametrize(
    "tool", [{"type": "function", "name": "f", "parameters": {}}, {"function": {"name": "f"}}]
)
async def test_functions_in_other_forms(tool: Json) -> None:
    engine = saying("Hi", tokenizer=hermes())
    async with serving(engine) as served:
        assert (await asked(served, tools=[tool]))[:2] == (200, "")
    [offered] = json.loads(prompts_of(engine)[0])[1]["tools"]
    assert offered["function"]["name"] == "f"


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_may_be_called(mode: str) -> None:
    engine = saying(called("f"), tokenizer=hermes())
    chosen = {"type": "function", "function": {"name": "f"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [chosen]}}
    async with serving(engine) as served:
        assert (await asked(served, tools=[FUNCTION, CUSTOM], tool_choice=choice))[0] == 200
        choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "g"}}]  # type: ignore[index]
        status, _, answer = await asked(served, tools=[FUNCTION, CUSTOM], tool_choice=choice)
        assert (status, answer["error"]["param"]) == (400, "tool_choice.allowed_tools.tools.0")
    offered = json.loads(prompts_of(engine)[0])[1]["tools"]
    assert len(offered) == (1 if mode == "auto" else 2)
