"""Tools and blocks of every type that the messages API has: read, or left out and named."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types.beta import beta_content_block_param, beta_tool_union_param
from anthropic.types.tool_choice_param import ToolChoiceParam

from tests.web.responses import prompts_of, saying
from tests.web.serving import Served, exchange, post, serving
from tests.web.test_response_tool_types import called, hermes, types_of

Json = dict[str, Any]
PATH, HEADER = "/v1/messages", "x-trouper-ignored"
OWN: Json = {"name": "f", "input_schema": {"type": "object"}}
CLIENTS = {
    "bash_20241022": "bash",
    "bash_20250124": "bash",
    "memory_20250818": "memory",
    "text_editor_20241022": "str_replace_editor",
    "text_editor_20250124": "str_replace_editor",
    "text_editor_20250429": "str_replace_based_edit_tool",
    "text_editor_20250728": "str_replace_based_edit_tool",
}
"""Tools that the client runs, with their names."""
HOSTED = {
    "code_execution_20250522",
    "code_execution_20250825",
    "code_execution_20260120",
    "code_execution_20260521",
    "computer_20241022",
    "computer_20250124",
    "computer_20251124",
    "computer_toolset_20260801",
    "browser_toolset_20260801",
    "web_search_20250305",
    "web_search_20260209",
    "web_search_20260318",
    "web_fetch_20250910",
    "web_fetch_20260209",
    "web_fetch_20260309",
    "web_fetch_20260318",
    "advisor_20260301",
    "tool_search_tool_bm25_20251119",
    "tool_search_tool_bm25",
    "tool_search_tool_regex_20251119",
    "tool_search_tool_regex",
    "mcp_toolset",
}
DOCUMENT: Json = {
    "type": "document",
    "title": "T",
    "source": {"type": "text", "media_type": "text/plain", "data": "words"},
}
PDF: Json = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="},
}
SEARCHED: Json = {
    "type": "search_result",
    "title": "T",
    "source": "http://x",
    "content": [{"type": "text", "text": "words"}],
}
REFERENCE: Json = {"type": "tool_reference", "tool_name": "late"}
TEXTS = {
    "document": (DOCUMENT, "T\nwords"),
    "search_result": (SEARCHED, "T\nhttp://x\nwords"),
    "tool_reference": ({"type": "tool_reference", "tool_name": "f"}, "The tool f is available."),
}
READ = {
    "text",
    "image",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
    "document",
    "search_result",
}
LEFT_OUT = {
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "advisor_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "container_upload",
    "compaction",
    "tool_addition",
    "tool_removal",
    "mcp_tool_listing",
    "fallback",
}


async def asked(served: Served, **body: Any) -> tuple[int, str, Json]:
    request = {"max_tokens": 200, "messages": [{"role": "user", "content": "x"}]} | body
    status, headers, data = await exchange(served, post(PATH, request))
    return status, headers.get(HEADER, ""), json.loads(data)


def test_every_type_of_the_package_is_known() -> None:
    assert set(types_of(beta_tool_union_param.BetaToolUnionParam)) == {"custom", *CLIENTS, *HOSTED}
    assert set(types_of(beta_content_block_param.BetaContentBlockParam)) == READ | LEFT_OUT
    kinds = {get_args(get_type_hints(member)["type"])[0] for member in get_args(ToolChoiceParam)}
    assert kinds == {"auto", "any", "tool", "none"}


@pytest.mark.parametrize("kind", CLIENTS)
async def test_tools_that_the_client_runs_have_their_input(kind: str) -> None:
    engine = saying(called(CLIENTS[kind], command="view"), tokenizer=hermes())
    async with serving(engine) as served:
        status, ignored, answer = await asked(served, tools=[{"type": kind, "name": CLIENTS[kind]}])
    assert (status, ignored) == (200, "")
    [block] = answer["content"]
    assert (block["type"], block["name"], block["input"]) == (
        "tool_use",
        CLIENTS[kind],
        {"command": "view"},
    )
    [tool] = json.loads(prompts_of(engine)[0])[1]["tools"]
    assert "command" in tool["function"]["parameters"]["properties"]


@pytest.mark.parametrize("kind", sorted(HOSTED))
async def test_what_nobody_runs_here_is_left_out_and_named(kind: str) -> None:
    tool = {"type": kind, "name": "x"}
    async with serving(saying("Hi", tokenizer=hermes())) as served:
        assert (await asked(served, tools=[tool, OWN]))[:2] == (200, f"tools.{kind}")
        assert (await asked(served, tools=[tool], tool_choice={"type": "auto"}))[:2] == (
            200,
            f"tools.{kind}",
        )
        assert (await asked(served, tools=[tool], tool_choice={"type": "any"}))[0] == 400
    async with serving(saying("Hi"), strict=True) as served:
        assert (await asked(served, tools=[tool, OWN]))[0] == 400


async def test_a_choice_that_only_tools_of_the_server_could_meet_is_told_so() -> None:
    """Without that, its client is told to send the tools that it has sent."""
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    async with serving(saying("x", tokenizer=hermes())) as served:
        status, _, answer = await asked(served, tools=tools, tool_choice={"type": "any"})
    assert (status, answer["error"]["message"]) == (
        400,
        "tool_choice needs tools, and none that can be called is offered",
    )


@pytest.mark.parametrize("kind", sorted(LEFT_OUT))
async def test_blocks_of_tools_that_nobody_runs_are_left_out_and_named(kind: str) -> None:
    block = {"type": kind, "id": "x", "content": []}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [block, {"type": "text", "text": "y"}]},
    ]
    engine = saying("Hi", tokenizer=hermes())
    async with serving(engine) as served:
        status, ignored, _ = await asked(
            served, messages=[*turns, {"role": "user", "content": [block]}]
        )
        assert (status, ignored) == (200, f"messages.content.{kind}")
    assert [turn["content"] for turn in json.loads(prompts_of(engine)[0])[0]] == ["x", "y", ""]


@pytest.mark.parametrize("kind", TEXTS)
async def test_what_holds_text_is_read(kind: str) -> None:
    block, text = TEXTS[kind]
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    turns = [
        {"role": "user", "content": [block]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    engine = saying("Hi", tokenizer=hermes())
    async with serving(engine) as served:
        assert (await asked(served, messages=turns, tools=[OWN]))[:2] == (200, "")
    first, _, last = json.loads(prompts_of(engine)[0])[0]
    assert (first["content"], last["content"]) == (text, text)


async def test_a_document_without_text_has_a_placeholder_and_is_named() -> None:
    engine = saying("Hi", tokenizer=hermes())
    async with serving(engine) as served:
        status, ignored, _ = await asked(served, messages=[{"role": "user", "content": [PDF]}])
        assert (status, ignored) == (200, "messages.content.document")
    assert "cannot read" in prompts_of(engine)[0]


@pytest.mark.parametrize(
    "choice",
    [
        "auto",
        "required",
        "any",
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "name": "f"},
    ],
)
async def test_choices_and_tools_as_openai_has_them(choice: Any) -> None:
    named: Json = {"name": "f", "parameters": {"type": "object"}}
    flat = {"type": "function", "function": None, **named}
    async with serving(saying(called("f"), tokenizer=hermes())) as served:
        for tool in ({"type": "function", "function": named}, flat):
            assert (await asked(served, tools=[tool], tool_choice=choice))[:2] == (200, "")


async def test_names_of_any_characters_come_back() -> None:
    engine = saying(called("a_b", a=1), tokenizer=hermes())
    async with serving(engine) as served:
        _, _, answer = await asked(served, tools=[OWN | {"name": "a/b"}])
        [block] = answer["content"]
        assert block["name"] == "a/b"
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": "y"}
        turns = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [block]},
            {"role": "user", "content": [result]},
        ]
        assert (await asked(served, messages=turns, tools=[OWN | {"name": "a/b"}]))[0] == 200
    [_, turn, _] = json.loads(prompts_of(engine)[-1])[0]
    assert turn["tool_calls"][0]["function"]["name"] == "a_b"


def tool(name: str, **more: Any) -> Json:
    return {
        "name": name,
        "description": f"Does {name}.",
        "input_schema": {"type": "object"},
        **more,
    }


FIND, LATE, NEVER = (
    tool("find"),
    tool("late", defer_loading=True),
    tool("never", defer_loading=True),
)
FOUND = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "find", "input": {}}],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c", "content": [REFERENCE]}],
    },
]


async def test_a_tool_that_is_loaded_later_is_described_there_and_the_prefix_stays() -> None:
    engine = saying(called("late", q=1), called("late", q=1), tokenizer=hermes())
    async with serving(engine) as served:
        before = await asked(served, tools=[FIND, NEVER], messages=FOUND[:1])
        after = await asked(served, tools=[FIND, LATE, NEVER], messages=FOUND)
    assert [status for status, *_ in (before, after)] == [200, 200]
    assert [ignored for _, ignored, _ in (before, after)] == ["", ""]
    [block] = after[2]["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "late", {"q": 1})
    (first, options), (second, later) = map(json.loads, prompts_of(engine))
    assert [each["function"]["name"] for each in options["tools"]] == ["find"]
    assert options["tools"] == later["tools"]
    assert second[: len(first)] == first
    said = second[-1]["content"]
    assert said.startswith("The tool late is available now:\n")
    described = json.loads(said.partition("\n")[2])
    assert described["function"] == {
        "name": "late",
        "description": "Does late.",
        "parameters": {"type": "object"},
    }
    assert "never" not in json.dumps([second, later])


async def test_a_deferred_tool_can_be_forced() -> None:
    engine = saying('{"name": "late", "arguments": {}}', tokenizer=hermes())
    async with serving(engine) as served:
        _, _, answer = await asked(
            served, tools=[FIND, LATE], tool_choice={"type": "tool", "name": "late"}
        )
    assert [block["name"] for block in answer["content"]] == ["late"]


async def test_without_a_search_of_the_clients_own_every_tool_is_loaded() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    engine = saying("x", tokenizer=hermes())
    async with serving(engine) as served:
        _, ignored, _ = await asked(served, tools=[search, FIND, LATE])
    assert "tools.defer_loading" in ignored
    [(_, options)] = map(json.loads, prompts_of(engine))
    assert [each["function"]["name"] for each in options["tools"]] == ["find", "late"]
