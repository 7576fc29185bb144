"""Bodies with one fault each, in three dialects: status, type, and the place of the fault in the
body that the client sent."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_images import SeeingEngine
from tests.web.serving import ask, pace, serving

Json = dict[str, Any]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BASE: dict[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
    RESPONSES: {"input": "a"},
    MESSAGES: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
}
SCHEMA = {"type": "object"}
NO_IMAGE = "data:image/png;base64,%"


def nested(name: Any = "f", **more: Any) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA} | more}


def flat(name: Any = "f", **more: Any) -> Json:
    return {"type": "function", "name": name, "parameters": SCHEMA} | more


def own(name: Any = "f", **more: Any) -> Json:
    return {"name": name, "input_schema": SCHEMA} | more


def says(*content: Any, role: str = "user", name: str = "messages") -> Json:
    """A conversation whose second message has this content."""
    return {name: [{"role": "user", "content": "a"}, {"role": role, "content": [*content]}]}


def called(**function: Any) -> Json:
    message = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", **function}]}
    return {"messages": [*BASE[CHAT]["messages"], message]}


def formatted(**schema: Any) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x"} | schema}}


def inputs(*items: Any) -> Json:
    return {"input": [{"role": "user", "content": "a"}, *items]}


def with_choice(choice: Any, *tools: Json) -> Json:
    return {"tools": [*tools], "tool_choice": choice}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c"}
BAD_TYPE = {"type": "object", "properties": {"a": 3}}
FAULTS: dict[str, list[tuple[Json, str]]] = {
    CHAT: [
        (says({"type": "text", "text": 3}), "messages.1.content.0.text"),
        (says({"type": "text", "text": "a"}, {"type": "text"}), "messages.1.content.1.text"),
        (says({"type": "text", "text": None}), "messages.1.content.0.text"),
        (says("a"), "messages.1.content.0"),
        (says({"type": "image_url", "image_url": {"url": NO_IMAGE}}), "messages.1.content.0"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "a"}] * 10_001}, "messages"),
        (called(function={"arguments": "{}"}), "messages.1.tool_calls.0.function.name"),
        (called(function={"name": "f"}, id=5), "messages.1.tool_calls.0.id"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": "1"}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids.1"),
        ({"logit_bias": {"5": 1, "6": 101}}, "logit_bias.6"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"chat_template_kwargs": {"tools": 3}}, "chat_template_kwargs.tools"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        (formatted(schema=3), "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"guided_choice": ["a", ""]}, "guided_choice.1"),
        ({"tools": [nested(), nested("g", parameters="x")]}, "tools.1.function.parameters"),
        ({"tools": [nested(), nested("")]}, "tools.1.function.name"),
        ({"tools": [nested(), {"type": "function"}]}, "tools.1.function"),
        ({"tools": [nested()] * 1025}, "tools"),
        (with_choice({"type": "function", "function": {"name": "g"}}, nested()), "tool_choice"),
        (with_choice("sometimes", nested()), "tool_choice"),
    ],
    RESPONSES: [
        (says({"type": "input_text", "text": 3}, name="input"), "input.1.content.0.text"),
        (says({"type": "input_text"}, name="input"), "input.1.content.0.text"),
        (says({"type": "refusal", "refusal": "a"}, name="input"), "input.1.content.0"),
        (says({"type": "input_image", "image_url": NO_IMAGE}, name="input"), "input.1.content.0"),
        (inputs({"role": "robot", "content": "a"}), "input.1.role"),
        (inputs({"role": "user", "content": None}), "input.1.content"),
        (inputs(3), "input.1"),
        ({"input": 3}, "input"),
        (inputs({**CALL, "arguments": None}), "input.1.arguments"),
        (inputs({**CALL, "name": 5}), "input.1.name"),
        (inputs(CALL, OUTPUT), "input.2.output"),
        (inputs(CALL, {**OUTPUT, "output": [{"type": "input_text"}]}), "input.2.output.0.text"),
        (inputs({**OUTPUT, "output": "a"}), "input.1.call_id"),
        (inputs({"type": "reasoning", "summary": 5}), "input.1.summary"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"include": [3]}, "include.0"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"metadata": {"a": "b", "c": 5}}, "metadata.c"),
        ({"metadata": {str(number): "a" for number in range(17)}}, "metadata"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "regex"}}}, "text.format.pattern"),
        ({"text": {"format": {"type": "json_schema", "name": 3}}}, "text.format.name"),
        ({"tools": [flat(), flat("g", parameters=[])]}, "tools.1.parameters"),
        ({"tools": [flat(), flat("g" * 257)]}, "tools.1.name"),
        (with_choice({"type": "function", "name": "g"}, flat()), "tool_choice"),
        (
            with_choice({"type": "allowed_tools", "mode": "never", "tools": [flat()]}, flat()),
            "tool_choice.mode",
        ),
    ],
    MESSAGES: [
        (says({"type": "text", "text": 3}), "messages.1.content.0.text"),
        (says({"type": "text", "text": "a"}, {"type": "text"}), "messages.1.content.1.text"),
        (says(5), "messages.1.content.0"),
        (says({"type": "image", "source": {"type": "url"}}), "messages.1.content.0"),
        (
            says({"type": "tool_result", "tool_use_id": 3, "content": "a"}),
            "messages.1.content.0.tool_use_id",
        ),
        (
            says({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text"}]}),
            "messages.1.content.0.content.0.text",
        ),
        (
            says({"type": "tool_use", "id": "t", "name": "f", "input": 5}, role="assistant"),
            "messages.1.content.0.input",
        ),
        (
            says({"type": "tool_use", "id": "t", "input": {}}, role="assistant"),
            "messages.1.content.0.name",
        ),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": None}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop_sequences": ["a", 4]}, "stop_sequences.1"),
        ({"system": [{"type": "text", "text": 5}]}, "system.0.text"),
        ({"system": 5}, "system"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": 3}}},
            "output_config.format.schema",
        ),
        ({"tools": [own(), own("g", input_schema=3)]}, "tools.1.input_schema"),
        ({"tools": [own(), {"name": "g"}]}, "tools.1.input_schema"),
        ({"tools": [own("g" * 257)]}, "tools.0.name"),
        ({"tools": [own()] * 1025}, "tools"),
        (with_choice({"type": "tool", "name": "g"}, own()), "tool_choice.name"),
        (with_choice({"type": "tool"}, own()), "tool_choice.name"),
        (with_choice({"type": "maybe"}, own()), "tool_choice"),
    ],
}
SEARCH = {"type": "web_search"}
WEB_CALL = {"type": "web_search_call", "id": "w"}
FILE, MADE_UP = {"type": "input_file", "file_id": "x"}, {"type": "made_up"}
ADAPTED: dict[str, list[tuple[Json, str]]] = {
    CHAT: [
        ({"tools": [SEARCH, nested("g", parameters="x")]}, "tools.1.function.parameters"),
        ({"tools": [SEARCH, {"function": {"name": 3}}]}, "tools.1.function.name"),
        ({"tools": [SEARCH, nested(), nested()]}, "tools"),
        ({"tools": [flat("g", parameters="x")]}, "tools.0.parameters"),
        (says(FILE, {"type": "text", "text": 3}, role="system"), "messages.1.content.1.text"),
        (
            says(MADE_UP, {"type": "image_url", "image_url": {"url": NO_IMAGE}}, role="user"),
            "messages.1.content.1",
        ),
        ({"extra_body": {"min_p": 2}}, "extra_body.min_p"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"n_predict": "x"}, "n_predict"),
        ({"reasoning": {"max_tokens": "x"}}, "reasoning.max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema"),
        ({"bad_words": ["x"]}, "bad_words"),
    ],
    RESPONSES: [
        (
            inputs(WEB_CALL, {"role": "user", "content": [FILE, {"type": "input_text"}]}),
            "input.2.content.1.text",
        ),
        (
            inputs(WEB_CALL, {"role": "assistant", "content": [FILE, {"type": "output_text"}]}),
            "input.2.content.1.text",
        ),
        (inputs(WEB_CALL, {**OUTPUT, "output": "a"}), "input.2.call_id"),
        ({"include": ["file_search_call.results", 3]}, "include.1"),
        ({"tools": [SEARCH, flat("g", parameters=[])]}, "tools.1.parameters"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [SEARCH, flat(strict=3)]}]},
            "tools.0.tools.1.strict",
        ),
        (
            with_choice(
                {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH, flat("g")]}, flat()
            ),
            "tool_choice.tools.1",
        ),
        (inputs({"type": "additional_tools", "tools": [flat(strict=3)]}), "input.1.tools.0.strict"),
        (
            {"tools": [flat("a")]}
            | inputs({"type": "additional_tools", "tools": [flat("b"), flat("g", strict=3)]}),
            "input.1.tools.1.strict",
        ),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"max_tokens": "x"}, "max_tokens"),
    ],
    MESSAGES: [
        (says(MADE_UP, {"type": "text", "text": 3}), "messages.1.content.1.text"),
        (
            says(MADE_UP, {"type": "tool_result", "content": [MADE_UP, {"type": "text"}]}),
            "messages.1.content.1.content.1.text",
        ),
        ({"tools": [{"type": "web_search_20250305"}, own(input_schema=3)]}, "tools.1.input_schema"),
        ({"tools": [own(), nested(parameters=5)]}, "tools.1.function.parameters"),
        (
            with_choice({"type": "function", "function": {"name": "g"}}, own()),
            "tool_choice.function.name",
        ),
        ({"extra_body": {"min_p": 2}}, "extra_body.min_p"),
        ({"max_completion_tokens": "x", "max_tokens": None}, "max_completion_tokens"),
    ],
}


def leads(param: str, body: Any) -> bool:
    """Whether the place is in the body, or is a field that its object lacks."""
    *around, last = param.split(".")
    for step in around:
        body = body[int(step)] if isinstance(body, list) else body[step]
    return isinstance(body, dict) or int(last) < len(body)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_one_fault_is_refused_by_its_param(path: str, strict: bool) -> None:
    faults = FAULTS[path] + ([] if strict else ADAPTED[path])
    assert len(faults) >= 30
    async with serving(SeeingEngine(before_step=pace), strict=strict) as served:
        for change, param in faults:
            body = BASE[path] | change
            status, answer = await ask(served, body, path)
            assert status == 400, (param, answer)
            error = answer["error"]
            assert error["type"] == "invalid_request_error"
            assert leads(param, body), param
            if path == MESSAGES:
                assert answer["type"] == "error"
                assert param in error["message"], (body, error)
                assert error["details"]["error_code"]
            else:
                assert error["param"] == param, (body, error)
                assert error["code"]
