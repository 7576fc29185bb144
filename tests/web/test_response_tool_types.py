"""Tools and items of every type that the responses API has: offered, or left out and named; calls
come back as the client knows them, streamed and complete, and are read when they are sent again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import openai
import pytest
from openai.types.responses import tool_param
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from tests.output.samples import FormatTokenizer
from tests.web.responses import Verbatim, by_client, prompts_of, saying
from tests.web.serving import Served, exchange, post, serving

Json = dict[str, Any]
PATH, HEADER = "/v1/responses", "x-trouper-ignored"
LARK = 'start: "add" " " /[a-z]+/'
FUNCTION: Json = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CUSTOM: Json = {"type": "custom", "name": "write", "description": "Writes."}
OFFERED: dict[str, tuple[Json, str]] = {
    "function": (FUNCTION, "f"),
    "custom": (CUSTOM, "write"),
    "namespace": (
        {"type": "namespace", "name": "mcp__hub", "description": "A hub.", "tools": [FUNCTION]},
        "mcp__hub__f",
    ),
    "local_shell": ({"type": "local_shell"}, "local_shell"),
    "shell": ({"type": "shell", "environment": {"type": "local"}}, "shell"),
    "apply_patch": ({"type": "apply_patch"}, "apply_patch"),
}
"""Tools that the client runs, and the model's names for them."""
HOSTED: dict[str, Json] = {
    "file_search": {"vector_store_ids": ["v"]},
    "computer": {},
    "computer_use_preview": {"display_height": 9, "display_width": 9, "environment": "linux"},
    "web_search": {},
    "web_search_2025_08_26": {},
    "web_search_preview": {},
    "web_search_preview_2025_03_11": {},
    "mcp": {"server_label": "x", "server_url": "http://127.0.0.1:1"},
    "code_interpreter": {"container": {"type": "auto"}},
    "programmatic_tool_calling": {},
    "image_generation": {},
    "tool_search": {},
}
CONTAINER: Json = {"type": "shell", "environment": {"type": "container_auto"}}


class Hermes(FormatTokenizer, Verbatim):
    """Writes calls as Qwen does, and shows every part of its prompt."""

    encode_chat = Verbatim.encode_chat


def hermes() -> Hermes:
    return Hermes("hermes", "think", ("<think>", "</think>"))


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def types_of(union: Any) -> Iterator[str]:
    """The values of `type` in all members of a union."""
    for member in (member for member in get_args(union) if isinstance(member, type)):
        hint = get_type_hints(member).get("type")
        while hint is not None and get_origin(hint) is not Literal:
            [hint, *_] = get_args(hint)
        yield from get_args(hint)


async def asked(served: Served, body: Json) -> tuple[int, str, Json]:
    status, headers, data = await exchange(served, post(PATH, {"input": "x"} | body))
    return status, headers.get(HEADER, ""), json.loads(data)


def test_every_type_of_the_package_is_known() -> None:
    assert set(types_of(tool_param.ToolParam)) == {*OFFERED, *HOSTED}
    assert set(types_of(ResponseInputItemParam)) == {*READ, *LEFT_OUT, *OTHERWISE}


@pytest.mark.parametrize("kind", OFFERED)
async def test_what_the_client_runs_is_a_function_for_the_model(kind: str) -> None:
    tool, name = OFFERED[kind]
    engine = saying("Hi", tokenizer=hermes())
    async with serving(engine) as served:
        status, ignored, answer = await asked(served, {"tools": [tool]})
        assert (status, ignored, answer["tools"]) == (200, "", [tool])
    [prompt] = set(prompts_of(engine))
    [function] = json.loads(prompt)[1]["tools"]
    assert function["function"]["name"] == name
    if kind not in ("function", "namespace"):
        assert function["function"]["parameters"]["required"]


@pytest.mark.parametrize("kind", [*HOSTED, "a_type_to_come", "shell"])
async def test_what_nobody_runs_here_is_left_out_and_named(kind: str) -> None:
    tool = CONTAINER if kind == "shell" else {"type": kind} | HOSTED.get(kind, {})
    engine = saying("Hi", tokenizer=hermes())
    async with serving(engine) as served:
        status, ignored, _ = await asked(served, {"tools": [tool, FUNCTION], "tool_choice": "auto"})
        assert (status, ignored) == (200, f"tools.{kind}")
        status, ignored, _ = await asked(served, {"tools": [tool], "tool_choice": "auto"})
        assert (status, ignored) == (200, f"tools.{kind}")
        for choice in ("required", {"type": kind}):
            status, _, answer = await asked(served, {"tools": [tool], "tool_choice": choice})
            assert (status, answer["error"]["param"]) == (400, "tool_choice"), (
                "nothing else may be called"
            )
    async with serving(engine, strict=True) as served:
        assert (await asked(served, {"tools": [tool, FUNCTION]}))[0] == 400
    assert kind not in prompts_of(engine)[0]


# -- calls: what the model writes, the item, and the output that a client sends back -------------

TURNS: dict[str, tuple[Json, str, Json, Json, str]] = {
    "function": (
        {"type": "function", "name": "files/read it", "parameters": {"type": "object"}},
        called("files_read_it", a=1),
        {"type": "function_call", "name": "files/read it", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "output": "done"},
        "done",
    ),
    "namespace": (
        OFFERED["namespace"][0],
        called("mcp__hub__f", a=1),
        {"type": "function_call", "name": "f", "namespace": "mcp__hub", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "output": "done"},
        "done",
    ),
    "custom": (
        CUSTOM,
        called("write", input='*** Begin "Patch"\n\u00e4\U0001f600\\n'),
        {
            "type": "custom_tool_call",
            "name": "write",
            "input": '*** Begin "Patch"\n\u00e4\U0001f600\\n',
        },
        {"type": "custom_tool_call_output", "output": "done"},
        "done",
    ),
    "local_shell": (
        {"type": "local_shell"},
        called("local_shell", command=["ls", "-l"], timeout_ms=9),
        {
            "type": "local_shell_call",
            "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 9},
        },
        {"type": "local_shell_call_output", "output": "done"},
        "done",
    ),
    "shell": (
        {"type": "shell"},
        called("shell", commands=["ls", "pwd"], timeout_ms=9),
        {
            "type": "shell_call",
            "action": {"commands": ["ls", "pwd"], "timeout_ms": 9, "max_output_length": None},
        },
        {
            "type": "shell_call_output",
            "output": [{"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 2}}],
        },
        "a\nb\nexit code: 2",
    ),
    "apply_patch": (
        {"type": "apply_patch"},
        called("apply_patch", type="update_file", path="x.py", diff="+a"),
        {
            "type": "apply_patch_call",
            "operation": {"type": "update_file", "path": "x.py", "diff": "+a"},
        },
        {"type": "apply_patch_call_output", "status": "failed"},
        "The patch failed.",
    ),
}
LEFT_OUT = (
    "file_search_call",
    "computer_call",
    "computer_call_output",
    "web_search_call",
    "tool_search_call",
    "configuration_update",
    "compaction",
    "image_generation_call",
    "code_interpreter_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "compaction_trigger",
    "program",
    "program_output",
)
OTHERWISE = ("message", "reasoning", "item_reference", "additional_tools", "tool_search_output")
"""Items that other tests send, and those that offer tools."""
READ = {item["type"] for turn in TURNS.values() for item in turn[2:4]}


def event_texts(events: list[Any], kind: str) -> str:
    return "".join(event.delta for event in events if event.type == f"response.{kind}.delta")


@pytest.mark.parametrize("kind", TURNS)
async def test_calls_are_items_and_items_are_read_again(kind: str) -> None:
    tool, text, item, output, said = TURNS[kind]
    engine = saying(text, text, "Done.", tokenizer=hermes())

    def use(client: openai.OpenAI) -> tuple[Json, Json, list[Any]]:
        request: Any = {"model": "fake", "input": "x", "tools": [tool]}
        complete = client.responses.create(**request)
        events = list(client.responses.create(**request, stream=True))
        last: Any = events[-1]
        return complete.output[0].to_dict(), last.response.output[0].to_dict(), events

    async with serving(engine) as served:
        complete, streamed, events = await by_client(served, use)
        for made in (complete, streamed):
            assert {name: made[name] for name in item} == item
            assert made["status"] == "completed" and made["call_id"]
        for event, field in (
            ("function_call_arguments", "arguments"),
            ("custom_tool_call_input", "input"),
        ):
            assert event_texts(events, event) == item.get(field, "")
        [done] = [
            event.item.to_dict() for event in events if event.type == "response.output_item.done"
        ]
        assert done == streamed
        again = [
            {"role": "user", "content": "x"},
            complete,
            output | {"call_id": complete["call_id"]},
        ]
        status, ignored, _ = await asked(served, {"input": again, "tools": [tool]})
        assert (status, ignored) == (200, "")
        status, _, answer = await asked(served, {"input": [again[2]], "tools": [tool]})
        assert (status, answer["error"]["param"]) == (400, "input.0.call_id"), (
            "an output needs its call"
        )
    [_, turn, result] = json.loads(prompts_of(engine)[-1])[0]
    written = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    [call] = turn["tool_calls"]
    assert call["function"] == written, "the model finds its call as it wrote it"
    assert result["content"] == said


@pytest.mark.parametrize("kind", LEFT_OUT)
async def test_items_of_tools_that_nobody_runs_are_left_out_and_named(kind: str) -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": kind, "id": "i", "call_id": "c", "output": {}},
    ]
    engine = saying("Hi", tokenizer=hermes())
    async with serving(engine) as served:
        assert (await asked(served, {"input": items}))[:2] == (200, f"input.{kind}")
    async with serving(engine, strict=True) as served:
        assert (await asked(served, {"input": items}))[0] == 400


@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
async def test_tools_that_items_bring_are_offered(kind: str) -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": kind, "role": "developer", "tools": [FUNCTION, CUSTOM]},
    ]
    engine = saying("Hi", tokenizer=hermes())
    async with serving(engine) as served:
        assert (await asked(served, {"input": items, "tools": [FUNCTION]}))[:2] == (200, "")
    tools = json.loads(prompts_of(engine)[-1])[1]["tools"]
    assert [tool["function"]["name"] for tool in tools] == ["f", "write"]


async def test_a_call_that_was_cut_is_incomplete() -> None:
    async with serving(saying(called("write", input="x" * 99), tokenizer=hermes())) as served:
        _, _, answer = await asked(served, {"tools": [CUSTOM], "max_output_tokens": 80})
        [item] = answer["output"]
        assert (answer["status"], item["status"], item["type"]) == (
            "incomplete",
            "incomplete",
            "custom_tool_call",
        )


# -- grammars, choices, names --------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_custom_tool_has_its_grammar(stream: bool) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": LARK}
    tool = CUSTOM | {"format": grammar}
    engine = saying('add "x"\n', tokenizer=hermes())
    async with serving(engine) as served:
        body = {
            "tools": [tool, FUNCTION],
            "tool_choice": {"type": "custom", "name": "write"},
            "stream": stream,
        }
        status, _, data = await exchange(served, post(PATH, {"input": "x"} | body))
        assert status == 200
        text = data.decode().split("data: ")[-1].partition("\n")[0] if stream else data
        last = json.loads(text)["response"] if stream else json.loads(text)
        [item] = last["output"]
        assert (item["type"], item["input"]) == ("custom_tool_call", 'add "x"\n')
    [enforced] = [admit.grammar for plan in engine.plans_seen for admit in plan.admit]
    assert enforced is not None
    assert LARK in json.loads(prompts_of(engine)[0])[1]["tools"][0]["function"]["description"]


@pytest.mark.parametrize(
    "choice",
    [
        {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "custom", "name": "write"}, {"type": "mcp"}],
        },
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "custom", "name": "write"}],
        },
        {"type": "custom", "name": "write"},
        {"type": "function", "function": {"name": "f"}},
        {"type": "shell"},
        {"type": "auto"},
        {"type": "any"},
        "any",
        {"type": "tool", "name": "f"},
    ],
)
async def test_choices_in_every_form(choice: Any) -> None:
    tools = [FUNCTION, CUSTOM, {"type": "shell"}]
    async with serving(saying(called("f"), tokenizer=hermes())) as served:
        assert (await asked(served, {"tools": tools, "tool_choice": choice}))[0] == 200


async def test_names_stay_apart_and_many_tools_are_offered() -> None:
    tools = [
        FUNCTION | {"name": name}
        for name in ("a b", "a_b", "a/b", *(f"tool{n}" for n in range(300)))
    ]
    engine = saying(called("a_b_2"), called("a_b_3"), tokenizer=FormatTokenizer.of("hermes"))
    async with serving(engine) as served:
        for name in ("a_b", "a/b"):
            status, _, answer = await asked(served, {"tools": tools, "input": name})
            assert (status, answer["output"][0]["name"]) == (200, name)
