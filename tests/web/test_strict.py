"""What generated bodies found: things that nobody read and nobody refused, and numbers in another
spelling."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import FakeEngine
from tests.web.serving import ask, serving

Json = dict[str, Any]
CHAT, TEXT, TOKENIZE, DETOKENIZE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
)
TOOL: Json = {"type": "function", "function": {"name": "f"}}
CALL: Json = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def said(**more: Any) -> Json:
    return {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y", **more},
        ]
    }


REFUSED: list[tuple[str, Json, str]] = [
    (CHAT, said(tool_calls=False), "messages.1.tool_calls"),
    (CHAT, said(tool_calls=[CALL | {"made_up": 1}]), "messages.1.tool_calls.0.made_up"),
    (CHAT, said(tool_calls=[CALL | {"type": "custom"}]), "messages.1.tool_calls.0.function"),
    (CHAT, said(tool_calls=[CALL | {"id": 3}]), "messages.1.tool_calls.0.id"),
    (
        CHAT,
        said(tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]),
        "messages.1.tool_calls.0.function.arguments",
    ),
    (CHAT, said(reasoning_content=["x"]), "messages.1.reasoning_content"),
    (CHAT, said(refusal="no"), "messages.1.refusal"),
    (CHAT, said(function_call={"name": "f"}), "messages.1.function_call"),
    (CHAT, said() | {"tools": [TOOL | {"made_up": 1}]}, "tools.0.made_up"),
    (
        CHAT,
        said() | {"tools": [{"type": "function", "function": {"name": "f", "strict": 0}}]},
        "tools.0.function.strict",
    ),
    (CHAT, said() | {"tools": [TOOL], "tool_choice": TOOL | {"made_up": 1}}, "tool_choice.made_up"),
    (CHAT, said() | {"parallel_tool_calls": 0}, "parallel_tool_calls"),
    (CHAT, said() | {"metadata": ["a"]}, "metadata"),
    (CHAT, said() | {"chat_template_kwargs": {"é": 1}}, "chat_template_kwargs.é"),
    (CHAT, said() | {"structured_outputs": {"json_object": 5}}, "structured_outputs.json_object"),
    (CHAT, {"messages": said()["messages"] * 5001}, "messages"),
    (TEXT, {"prompt": [7] * (2**20 + 1)}, "prompt"),
    (DETOKENIZE, {"tokens": [7] * (2**20 + 1)}, "tokens"),
    (TOKENIZE, {"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs"),
    (
        "/v1/responses",
        {"input": "x", "tools": [{"type": "function", "name": "f", "async": 0}]},
        "tools.0.async",
    ),
    ("/v1/responses/input_tokens", {"input": "x", "max_output_tokens": 10**6}, "max_output_tokens"),
    ("/v1/messages", said() | {"max_tokens": 1, "messages": said()["messages"] * 5001}, "messages"),
]


async def test_what_would_be_ignored_is_refused_by_name() -> None:
    async with serving(FakeEngine(), strict=True) as served:
        for path, body, param in REFUSED:
            status, answer = await ask(served, body, path)
            error = answer["error"]
            assert (status, error.get("param", param)) == (400, param), (path, error)
            assert param in error["message"], (path, error)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            TEXT,
            {
                "prompt": [97.0, 98],
                "max_tokens": 2.0,
                "top_k": 5.0,
                "stop_token_ids": [1.0],
                "priority": 0.0,
            },
        ),
        (TEXT, {"prompt": [[97.0], "b"]}),
        (DETOKENIZE, {"tokens": [97.0]}),
    ],
)
async def test_a_whole_number_is_an_integer_however_it_is_written(path: str, body: Json) -> None:
    async with serving(FakeEngine()) as served:
        assert (await ask(served, body, path))[0] == 200
