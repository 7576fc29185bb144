"""Requests against their schema, and answers in pieces: no server, many examples."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.fakes import ByteTokenizer
from tests.web.test_speech import cut
from trouper.protocol.problems import Problem, RequestFailed
from trouper.protocol.sampling import SamplingDefaults
from trouper.web.anthropic.errors import TYPES, anthropic_error, is_anthropic
from trouper.web.anthropic.message_dialect import COMPONENTS, Blocks
from trouper.web.anthropic.message_history import AssistantBlock, ToolResultBlock
from trouper.web.anthropic.messages import (
    CountRequest,
    MessagesRequest,
    messages_to_generate,
    prompt_of,
)
from trouper.web.anthropic.thinking import CARRIES, signature_of, thought
from trouper.web.http.openapi import BEYOND_SCHEMA
from trouper.web.http.request_schema import components_of, schema_of
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.tool_calls import Tools

Json = dict[str, Any]
Path = tuple[str | int, ...]

CACHING = {"cache_control": {"type": "ephemeral"}}
RICH: Json = {
    "model": "fake",
    "max_tokens": 4096,
    "system": [{"type": "text", "text": "Be kind.", **CACHING}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                {"type": "text", "text": "I look.", "citations": None},
                {
                    "type": "tool_use",
                    "id": "1",
                    "name": "look",
                    "input": {},
                    "caller": {"type": "direct"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "x"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Well?"},
            ],
        },
        {"role": "system", "content": "Now."},
    ],
    "tools": [
        {
            "type": "custom",
            "name": "look",
            "description": "Looks",
            "input_schema": {"type": "object"},
            "strict": True,
            "defer_loading": False,
            "allowed_callers": ["direct"],
            **CACHING,
        }
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2048, "display": "omitted"},
    "output_config": {"effort": "low"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "me"},
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "stream": True,
    "service_tier": "auto",
    "mcp_servers": [],
    "chat_template_kwargs": {"some": 1},
    "cache_salt": "s",
}
STRUCTURED: Json = {
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "Hi"}],
    "thinking": {"type": "adaptive"},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
}
FORCED: Json = {
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "look"},
}
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    1.5,
    10**400,
    "",
    "x",
    "text",
    "any",
    "none",
    "tool",
    "auto",
    "all",
    "user",
    "enabled",
    "disabled",
    "adaptive",
    "custom",
    "image",
    [],
    [None],
    [{}],
    {},
    {"type": "text"},
    {"type": "text", "text": "x"},
    {"type": "object"},
    {"type": "direct"},
    {"type": "all"},
    "clear_thinking_20251015",
)
NAMES = (
    "type",
    "text",
    "content",
    "cache_control",
    "name",
    "display",
    "is_error",
    "edits",
    "signature",
    "made_up",
    "seed",
)
KINDS = (MessagesRequest, CountRequest)
COMMON = {
    "components": {"schemas": {**COMPONENTS, **components_of(KINDS), "Model": {"type": "string"}}}
}
BLOCKS = {kind.__struct_config__.tag for kind in (*get_args(AssistantBlock), ToolResultBlock)}
SCHEMAS = {kind: Draft202012Validator({**COMMON, "allOf": [schema_of(kind)]}) for kind in KINDS}


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Of everything inside."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in inside:
        yield (*at, key)
        yield from paths(inner, (*at, key))


def at(body: Any, path: Path) -> Any:
    for key in path:
        body = body[key]
    return body


@st.composite
def bodies(draw: st.DrawFn) -> Json:
    """A good one, changed in one or two places."""
    body = copy.deepcopy(draw(st.sampled_from([RICH, STRUCTURED, FORCED])))
    for _ in range(draw(st.integers(0, 2))):
        path = draw(st.sampled_from(list(paths(body)) or [("messages",)]))
        holder = at(body, path[:-1])
        how = draw(st.sampled_from(["replace", "remove", "add"]))
        value = copy.deepcopy(draw(st.sampled_from(VALUES)))
        if how == "remove":
            holder.pop(path[-1], None) if isinstance(holder, dict) else holder.pop(path[-1])
        elif how == "add" and isinstance(at(body, path), dict):
            at(body, path)[draw(st.sampled_from(NAMES))] = value
        elif how == "add" and isinstance(at(body, path), list):
            at(body, path).append(value)
        else:
            holder[path[-1]] = value
    return body


def refusal(kind: type[CountRequest], body: Json) -> Problem | None:
    try:
        if kind is MessagesRequest:
            messages_to_generate(MessagesRequest.parse(body), "id", SamplingDefaults())
        else:
            prompt_of(CountRequest.parse(body))
    except RequestFailed as refused:
        return refused.problem
    return None


def test_the_examples_are_good() -> None:
    for body in (RICH, STRUCTURED, FORCED):
        assert refusal(MessagesRequest, body) is None
        SCHEMAS[MessagesRequest].validate(body)


def test_a_null_says_nothing_wherever_it_stands() -> None:
    """A block of one kind may name what belongs to another, if it is null."""
    body = copy.deepcopy(RICH)
    for holder in [at(body, path) for path in paths(body) if path[0] == "messages"]:
        if isinstance(holder, dict) and holder.get("type") in BLOCKS:
            names = {
                "text",
                "thinking",
                "data",
                "input",
                "content",
                "name",
                "id",
                "signature",
                "tool_use_id",
                "is_error",
            }
            holder.update(dict.fromkeys(names - holder.keys()))
    assert prompt_of(MessagesRequest.parse(body)) == prompt_of(MessagesRequest.parse(RICH))


@given(bodies())
@example(RICH | {"tool_choice": {"type": "any", "name": None}})
@example(FORCED | {"tools": []})
def test_schema_and_checks_agree(body: Json) -> None:
    """Whatever is no 400 by the schema is none, unless for a reason that the document lists; and
    the other way round."""
    for kind, schema in SCHEMAS.items():
        problem = refusal(kind, body)
        if schema.is_valid(body):
            assert problem is None or problem.code in BEYOND_SCHEMA, problem
        else:
            assert problem is not None, [error.message for error in schema.iter_errors(body)]
        assert problem is None or problem.status == 400


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<call>{"name": "f", "arguments": {"a": 1}}</call>'
NO_CALL = '<call>{"name": "f", "arguments": [1]}</call>'
SAID = st.lists(
    st.sampled_from(
        ["<think>", "</think>", CALL, NO_CALL, "<call>", "a", " ", "\n", "\n\n", "b c"]
    ),
    max_size=12,
).map("".join)


def spoken(pieces: Sequence[str], *, omitted: bool) -> tuple[list[Json], list[Json]]:
    """The content, and what a client makes of the events."""
    parser, blocks = (
        OutputParser(Tools((TOOL,)), ByteTokenizer(), thinks=False),
        Blocks(omitted=omitted),
    )
    events = [event for piece in pieces for event in blocks.say(parser.push(piece))]
    events += [*blocks.say(parser.end()), *blocks.end()]
    content = blocks.content
    assert blocks.calls == sum(block["type"] == "tool_use" for block in content)
    return [without_id(block) for block in content], [without_id(block) for block in heard(events)]


def without_id(block: Json) -> Json:
    return {name: value for name, value in block.items() if name != "id"}


def heard(events: Sequence[Json]) -> list[Json]:
    """As a client puts them together; one block at a time, in order."""
    content: list[Json] = []
    written = ""
    opened = False
    for event in events:
        assert event["index"] == len(content) - opened
        match event["type"]:
            case "content_block_start":
                assert not opened
                opened, written = True, ""
                content.append(copy.deepcopy(event["content_block"]))
            case "content_block_delta":
                delta = {name: value for name, value in event["delta"].items() if name != "type"}
                [(name, more)] = delta.items()
                if name == "partial_json":
                    written += more
                else:
                    content[-1][name] += more
            case "content_block_stop":
                opened = False
                if written:
                    content[-1]["input"] = msgspec.json.decode(written)
    assert not opened
    return content


@given(SAID, st.lists(st.integers(0, 400), max_size=6), st.booleans())
@example("<think></think>\n\nYes", list(range(30)), False)
@example(f"{CALL}a\nb", [len(CALL) + 1], False)
def test_d13_events_add_up_to_the_whole_message(
    text: str, places: list[int], omitted: bool
) -> None:
    content, client = spoken(cut(text, places), omitted=omitted)
    assert client == content == spoken([text], omitted=omitted)[0]
    texts = [block["text"] for block in content if block["type"] == "text"]
    assert all(one.strip() for one in texts) or len(content) == 1


@given(st.text())
def test_a_signature_carries_what_is_not_shown(text: str) -> None:
    assert thought("", signature_of(text, omitted=True)) == text


@pytest.mark.parametrize(
    "signature", [None, "", "EqQBCgIYAhIM", CARRIES + "no base64", CARRIES + "/w=="]
)
def test_a_signature_of_somebody_else_carries_nothing(signature: str | None) -> None:
    assert thought("", signature) == ""
    assert thought("hm", signature) == "hm"


@pytest.mark.parametrize(
    "status", [400, 401, 404, 405, 408, 413, 415, 422, 429, 499, 500, 501, 503, 504]
)
def test_each_status_has_a_type(status: int) -> None:
    error = anthropic_error(Problem(status, "no", code="c"), "id")
    assert error["error"]["type"] in {*TYPES.values(), "invalid_request_error", "api_error"}
    assert (status < 499) == (
        error["error"]["type"] not in ("api_error", "overloaded_error", "timeout_error")
    ) or (status == 408)
    Draft202012Validator({**COMMON, "allOf": [COMPONENTS["AnthropicError"]]}).validate(error)


def test_a_budget_that_left_no_token_is_named_as_in_a_body() -> None:
    problem = Problem(
        400, "no token, by thinking_token_budget", param="thinking_token_budget", code="no_choice"
    )
    message = anthropic_error(problem, "")["error"]["message"]
    assert message == "no token, by thinking.budget_tokens"


def test_the_message_names_what_has_no_other_place() -> None:
    assert anthropic_error(Problem(400, "no", param="a.b"), "")["error"] == {
        "type": "invalid_request_error",
        "message": "a.b: no",
    }
    assert (
        anthropic_error(Problem(400, "a.b is no", param="a.b"), "")["error"]["message"]
        == "a.b is no"
    )
    assert [is_anthropic(path) for path in ("/v1/messages", "/v1/messages/x", "/v1/messagesx")] == [
        True,
        True,
        False,
    ]
