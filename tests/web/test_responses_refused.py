"""What the responses API refuses, and by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.long_tests import examples
from tests.web.responses import TOOL, saying
from tests.web.serving import a_stream_that_goes_on, ask, exchange, get, post, serving

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
    (
        {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}]},
        400,
        "input.0.content.0",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
        400,
        "input.0.content.0",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "input.0.content.0"),
    (
        {"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
        400,
        "input.0.content.0",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        400,
        "input.0.content.0.text",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "", "x": 1}]}]},
        400,
        "input.0.content.0.x",
    ),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, 400, "input.0.type"),
    (
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]},
        400,
        "input.0.arguments",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[]"}]},
        400,
        "input.0.arguments",
    ),
    (
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
        400,
        "input.0.call_id",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
        400,
        "input.0.call_id",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": None}]},
        400,
        "input.0.output",
    ),
    ({"input": [{"type": "reasoning", "summary": "x"}]}, 400, "input.0.summary"),
    (
        {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
        400,
        "input.0.encrypted_content",
    ),
    ({"input": [{"type": "item_reference", "id": "none"}]}, 404, "input.0.id"),
    ({"input": [{"type": "item_reference", "id": 3}]}, 400, "input.0.id"),
    ({"metadata": {"a": 1}}, 400, "metadata.a"),
    ({"metadata": {"a": "x" * 513}}, 400, "metadata.a"),
    ({"metadata": {str(n): "x" for n in range(17)}}, 400, "metadata"),
    ({"model": "other"}, 404, "model"),
    ({"previous_response_id": "resp_none"}, 400, "previous_response_id"),
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
    ({"tools": [{"type": "custom", "name": "a b"}]}, 400, "tools.0.name"),
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
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [TOOL]}},
        400,
        "tool_choice.mode",
    ),
    ({"text": {"format": {"type": "xml"}}}, 400, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, 400, "text.format.name"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}},
        400,
        "text.format.schema",
    ),
    ({"text": {"format": {"type": "regex", "pattern": "wrong"}}}, 400, "text.format.pattern"),
    ({"text": {"verbosity": "low"}}, 400, "text.verbosity"),
    ({"text": {"other": 1}}, 400, "text.other"),
    ({"reasoning": {"effort": "most"}}, 400, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, 400, "reasoning.summary"),
    ({"reasoning": "high"}, 400, "reasoning"),
    ({"background": True, "store": False}, 400, "background"),
    ({"stream_options": {}}, 400, "stream_options"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "stream_options.include_obfuscation",
    ),
    (
        {"stream": True, "stream_options": {"include_usage": True}},
        400,
        "stream_options.include_usage",
    ),
    ({"seed": "x"}, 400, "seed"),
    ({"cache_salt": "x" * 1025}, 400, "cache_salt"),
    ({"chat_template_kwargs": {"self": 1}}, 400, "chat_template_kwargs.self"),
    ({"made_up": 1}, 400, "made_up"),
]


async def test_errors_name_the_parameter() -> None:
    async with serving(saying("x"), strict=True) as served:
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
    async with serving(saying("x"), strict=True) as served:
        _, made = await ask(served, {"input": "x"}, "/v1/responses")
        status, _, said = await exchange(served, get(f"/v1/responses/{made['id']}{query}"))
        assert (status, json.loads(said)["error"]["param"]) == (400, param)


async def test_neutral_and_harmless_parameters() -> None:
    harmless: dict[str, Any] = {
        "truncation": "disabled",
        "service_tier": "auto",
        "conversation": None,
        "text": {"verbosity": "medium"},
        "reasoning": {"summary": "auto", "effort": None},
        "include": [],
        "max_tool_calls": 3,
        "top_logprobs": 0,
        "prompt_cache_retention": "24h",
        "client_metadata": {"a": 1},
        "tools": [],
        "tool_choice": "none",
        "stop": "z",
        "seed": 3,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "logit_bias": {"97": 1},
        "frequency_penalty": 0.1,
        "cache_salt": "s",
        "min_tokens": 1,
        "stop_token_ids": [98],
        "previous_response_id": None,
        "stream_options": None,
        "metadata": {},
        "thinking_token_budget": 5,
        "modalities": ["text"],
        "context_management": [],
        "background_options": {"completion_window": "soonest"},
    }
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
                assert status == (200 if depth == 100 and "metadata" not in around else 400), (
                    around,
                    depth,
                )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
parts = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["input_text", "output_text", "refusal", "summary_text", "input_image"]
        )
    },
    optional={"text": json_values, "refusal": json_values, "annotations": json_values},
)
items = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            [
                "message",
                "function_call",
                "function_call_output",
                "reasoning",
                "item_reference",
                3,
                None,
            ]
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
    optional=dict.fromkeys(
        (
            "model",
            "instructions",
            "previous_response_id",
            "max_output_tokens",
            "include",
            "tools",
            "tool_choice",
            "text",
            "reasoning",
            "store",
            "background",
            "metadata",
            "stream",
            "stream_options",
            "top_logprobs",
            "max_tool_calls",
        ),
        json_values,
    ),
)


async def test_fuzzed_bodies_never_break_anything() -> None:
    sent: list[bytes] = []

    @settings(max_examples=examples(150), database=None, suppress_health_check=list(HealthCheck))
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
