"""/openapi.json says what is there, and what it says is true."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from jsonschema import Draft202012Validator

from tests.fakes import FakeEngine, Ranking
from tests.web.batching import request, started, strict
from tests.web.exact_answers import parts_of_answers, references, without_room
from tests.web.serving import Served, ask, exchange, get, post, serving
from trouper.web.http.openapi import BEYOND_SCHEMA

Json = dict[str, Any]
STREAMED = "text/event-stream"
BRIEF = {"default_max_tokens": 64}
"""Each event of an answer is compared with its schema."""


async def described(served: Served, headers: str = "") -> Json:
    status, _, body = await exchange(served, get("/openapi.json", headers))
    assert status == 200
    document = json.loads(body)
    assert isinstance(document, dict)
    return without_room(document)


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def validator(document: Json, schema: Json) -> Draft202012Validator:
    """References are to the document's components."""
    return Draft202012Validator({"components": document["components"], "allOf": [schema]})


def request_of(document: Json, path: str) -> Json:
    """The schema of a POST's JSON body, itself and no reference."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    component = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert isinstance(component, dict)
    return component


def schemas(document: Json) -> Iterator[Json]:
    yield from document["components"]["schemas"].values()
    for _, _, operation in operations(document):
        for content in operation.get("requestBody", {"content": {}})["content"].values():
            yield content["schema"]
        for response in operation["responses"].values():
            for content in response["content"].values():
                yield content["schema"]


async def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    async with serving() as served:
        document = await described(served)
    for schema in schemas(document):
        Draft202012Validator.check_schema(schema)
    assert {*references(document)} <= {*document["components"]["schemas"]}
    names_of_operations = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(names_of_operations) == len(set(names_of_operations)) >= 12
    assert all(re.fullmatch("[a-z]+([A-Z][a-z]+)*", name) for name in names_of_operations)
    for name, schema in document["components"]["schemas"].items():
        assert schema["title"] == name
        assert re.fullmatch("([A-Z][a-z]*)+", name), "a generated class has this name"


@pytest.mark.parametrize("strict", [False, True])
async def test_nothing_is_there_that_generators_of_clients_cannot_read(strict: bool) -> None:
    """As openapi-python-client, datamodel-code-generator and openapi-generator have it."""
    async with serving(strict=strict) as served:
        document = await described(served)
    components = document["components"]["schemas"]
    for schema in schemas(document):
        for part in read_by_generators(schema):
            assert "allOf" not in part and "prefixItems" not in part
            values = part.get("enum", ["x"])
            assert {type(value) for value in values} in ({str}, {int}), part
            assert "properties" not in part or part in components.values(), part
            for one in part.get("properties", {}).values():
                assert "default" not in one, "openapi-typescript takes it for required"
                assert strict or one.get("type") != "null", "openapi-generator fails"
            if "discriminator" in part:
                tag = part["discriminator"]["propertyName"]
                for member in part["anyOf"]:
                    named = components[member["$ref"].rpartition("/")[2]]
                    assert tag in named["required"] and "const" in named["properties"][tag]


def read_by_generators(schema: object) -> Iterator[Json]:
    """A schema and those inside of it, without rules between properties and events of streams."""
    if isinstance(schema, dict):
        if "contentSchema" in json.dumps(schema.get("properties", schema.get("anyOf", {}))):
            return
        yield schema
        for key in ("items", "additionalProperties"):
            yield from read_by_generators(schema.get(key))
        for one in [*schema.get("anyOf", ()), *schema.get("properties", {}).values()]:
            yield from read_by_generators(one)


async def test_answers_may_have_fields_of_later_versions() -> None:
    """A client that was generated before an update reads what the server sends after it."""
    async with serving() as served:
        document = json.loads((await exchange(served, get("/openapi.json")))[2])
    answers = parts_of_answers(document)
    assert len(answers) > 50
    for name in answers:
        assert document["components"]["schemas"][name].get("additionalProperties", True), name


async def test_each_example_is_valid_and_answered_as_described() -> None:
    """Whole, and where it can be streamed each event too."""
    async with serving(FakeEngine(tokenizer=Ranking()), BRIEF, adapters_from=("/",)) as served:
        document = await described(served)
        seen = 0
        for method, path, operation in operations(document):
            if method != "POST" or "requestBody" not in operation:
                continue
            content = operation["requestBody"]["content"].get("application/json", {})
            for example in content.get("examples", {}).values():
                validator(document, content["schema"]).validate(example["value"])
                await check_answers(served, document, path, example["value"])
                seen += 1
    assert seen >= 4


async def check_answers(served: Served, document: Json, path: str, body: Json) -> None:
    contents = document["paths"][path]["post"]["responses"]["200"]["content"]
    status, _, answer = await exchange(served, post(path, body))
    assert status == 200
    [kind] = contents.keys() - {STREAMED}
    body_of = json.loads if kind == "application/json" else bytes.decode
    validator(document, contents[kind]["schema"]).validate(body_of(answer))
    if STREAMED in contents:
        await check_events(served, document, path, body | {"stream": True})


def data_of(event: Json) -> Json:
    """The schema of an event's data."""
    [schema] = [
        one for one in event.get("anyOf", [event]) if "const" not in one["properties"]["data"]
    ]
    content = schema["properties"]["data"]["contentSchema"]
    assert isinstance(content, dict)
    return content


async def check_events(served: Served, document: Json, path: str, body: Json) -> None:
    schema = data_of(
        document["paths"][path]["post"]["responses"]["200"]["content"][STREAMED]["schema"]
    )
    _, _, answer = await exchange(served, post(path, body))
    events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    assert len(events) >= 2
    for event in events:
        validator(document, schema).validate(event)


FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
RICH: list[tuple[str, Json]] = [
    (
        "/v1/chat/completions",
        {"logprobs": True, "top_logprobs": 2, "n": 2, "return_token_ids": True},
    ),
    ("/v1/chat/completions", {"tools": [CALL], "tool_choice": "required"}),
    (
        "/v1/chat/completions",
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    (
        "/v1/responses",
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "metadata": {"a": "b"}},
    ),
    ("/v1/responses", {"tools": [FLAT], "tool_choice": "required"}),
    (
        "/v1/responses",
        {"max_output_tokens": 3, "instructions": "Be kind.", "reasoning": {"effort": "low"}},
    ),
    ("/v1/completions", {"logprobs": 2, "echo": True, "n": 2, "return_token_ids": True}),
    ("/v1/completions", {"max_tokens": 0, "echo": True, "logprobs": 0}),
    ("/v1/completions", {"stop": "a"}),
]


@pytest.mark.parametrize(("path", "body"), RICH)
async def test_what_can_be_in_an_answer_is_described(path: str, body: Json) -> None:
    call = '{"name":"f","arguments":{"a":1}}'
    engine = FakeEngine(token_at=lambda _, position: call.encode()[position % len(call)])
    shared: Json = {"max_tokens": len(call)}
    shared |= (
        {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "ab"}
    )
    if "responses" in path:
        shared = {"input": "x", "max_output_tokens": len(call)}
    async with serving(engine) as served:
        document = await described(served)
        if "stream_options" in body:
            await check_events(served, document, path, shared | body | {"stream": True})
        else:
            await check_answers(served, document, path, shared | body)


PARTS: list[Json] = [
    *(
        {"type": kind, "text": "x"}
        for kind in ("text", "input_text", "output_text", "summary_text", "reasoning_text")
    ),
    {"type": "refusal", "refusal": "x"},
    *(
        {"type": kind}
        for kind in (
            "input_image",
            "image_url",
            "image",
            "input_file",
            "input_audio",
            "video_url",
            "file",
        )
    ),
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
    {"type": "search_result", "title": "T", "source": "x", "content": []},
    {"type": "tool_reference", "tool_name": "f"},
    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    {"type": "tool_result", "tool_use_id": "c"},
    {"type": "thinking", "thinking": "x"},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "made_up", "text": "x"},
    {"text": "x"},
]
"""Parts of content of every type that one of the dialects has."""
RESULT: Json = {"type": "tool_result", "tool_use_id": "c"}


def chat_with(role: str) -> Callable[[Json], Json]:
    return lambda part: {"messages": [{"role": role, "content": [part]}], "max_tokens": 2}


def turns_with(role: str) -> Callable[[Json], Json]:
    return lambda part: {"max_tokens": 2, "messages": [{"role": role, "content": [part]}]}


def item_with(item: Json, name: str) -> Callable[[Json], Json]:
    calls: dict[str, Json] = {
        "function_call_output": {"type": "function_call", "name": "f", "arguments": "{}"},
        "custom_tool_call_output": {"type": "custom_tool_call", "name": "f", "input": ""},
        "local_shell_call_output": {
            "type": "local_shell_call",
            "action": {"type": "exec", "command": []},
        },
    }
    before = [calls[item["type"]] | {"call_id": "c"}] if item.get("type") in calls else []
    return lambda part: {"input": [*before, item | {name: [part]}], "max_output_tokens": 2}


HOLDERS: dict[str, tuple[str, Callable[[Json], Json]]] = {
    **{
        f"chat {role}": ("/v1/chat/completions", chat_with(role))
        for role in ("system", "developer", "user", "assistant", "tool")
    },
    **{
        f"messages {role}": ("/v1/messages", turns_with(role))
        for role in ("user", "assistant", "system")
    },
    "messages first": (
        "/v1/messages",
        lambda part: turns_with("user")({"type": "text", "text": "x"}) | {"system": [part]},
    ),
    "messages result": (
        "/v1/messages",
        lambda part: turns_with("user")(RESULT | {"content": [part]}),
    ),
    **{
        f"responses {role}": ("/v1/responses", item_with({"role": role}, "content"))
        for role in ("system", "developer", "user", "assistant")
    },
    **{
        f"responses {kind}": ("/v1/responses", item_with({"type": kind, "call_id": "c"}, "output"))
        for kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
    },
    "responses summary": ("/v1/responses", item_with({"type": "reasoning"}, "summary")),
    "responses content": (
        "/v1/responses",
        item_with({"type": "reasoning", "summary": []}, "content"),
    ),
}
"""Where content may be: the endpoint, and its body with a part there."""


@pytest.mark.parametrize("holder", HOLDERS)
async def test_parts_of_content_are_described_as_they_are_read(holder: str) -> None:
    """A strict server's description allows what is read, and what is refused with a code that the
    document lists."""
    path, body_with = HOLDERS[holder]
    async with serving(FakeEngine(), strict=True) as served:
        document = await described(served)
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"][
            "schema"
        ]
        allowed = []
        for part in PARTS:
            body = body_with(part)
            status, answer = await ask(served, body, path)
            valid = validator(document, schema).is_valid(body)
            error = answer.get("error") or {}
            code = error.get("code") or error.get("details", {}).get("error_code")
            assert valid == (status == 200 or code in BEYOND_SCHEMA), (part, valid, answer)
            allowed += [part] if valid else []
    assert allowed


async def test_the_rest_answers_as_described(tmp_path: Path) -> None:
    async with serving(batch_dir=tmp_path) as served:
        document = await described(served)
        batch = await trio.to_thread.run_sync(
            lambda: started(strict(served.base_url), [request("a")])
        )
        _, made = await ask(served, {"input": "x", "max_output_tokens": 2}, "/v1/responses")
        checked = set[str]()
        for method, path, operation in operations(document):
            if method == "GET" and "application/json" in operation["responses"]["200"]["content"]:
                named = path.replace("{model}", "fake").replace("{response_id}", made["id"])
                named = named.replace("{file_id}", batch.input_file_id).replace(
                    "{batch_id}", batch.id
                )
                named = named.replace("{request_id}", made["id"])
                status, headers, body = await exchange(served, get(named))
                assert (status, headers["content-type"]) == (200, "application/json")
                content = operation["responses"]["200"]["content"]["application/json"]
                validator(document, content["schema"]).validate(json.loads(body))
                checked.add(path)
        assert checked >= {
            "/v1/files",
            "/v1/files/{file_id}",
            "/v1/batches",
            "/v1/batches/{batch_id}",
        }
        assert checked >= {
            "/health",
            "/v1/models",
            "/v1/models/{model}",
            "/v1/responses/{response_id}",
        }
        status, _, body = await exchange(served, get("/v1/models/none"))
        error = document["paths"]["/v1/models/{model}"]["get"]["responses"]["404"]["content"][
            "application/json"
        ]
        validator(document, error["schema"]).validate(json.loads(body))


async def test_only_a_key_learns_the_names_of_the_models() -> None:
    async with serving(api_key=("k",), model_alias=("off",)) as served:
        stranger, friend = (
            await described(served),
            await described(served, "Authorization: Bearer k\r\n"),
        )
    assert "fake" not in json.dumps(stranger)
    assert friend["components"]["schemas"]["Model"]["enum"] == ["fake"]
    for document in (stranger, friend):
        assert set(document["components"]["securitySchemes"]) == {"bearer", "key"}
        keyless = {
            path for _, path, operation in operations(document) if "security" not in operation
        }
        assert keyless == {
            "/",
            "/health",
            "/api/hello",
            "/livez",
            "/readyz",
            "/metrics",
            "/openapi.json",
            "/docs",
        }


async def test_the_page_needs_no_other_host() -> None:
    async with serving() as served:
        status, headers, body = await exchange(served, get("/docs"))
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert b"openapi.json" in body and b"://" not in body


async def test_what_the_model_alone_refuses_is_named_as_beyond_the_schema() -> None:
    """No schema knows whether there is a draft model, or how many tokens a text has."""
    bodies: dict[str, dict[str, Any]] = {
        "speculation_not_supported": {"prompt": "x", "speculation": "draft_model"},
        "context_length_exceeded": {"prompt": "x" * 50},
        "empty_prompt": {"prompt": ""},
        "invalid_token": {"prompt": [2**30]},
    }
    async with serving(FakeEngine(), {"max_kv_size": 40}) as served:
        for code, body in bodies.items():
            status, answer = await ask(served, body, "/v1/completions")
            assert (status, answer["error"]["code"]) == (400, code)
            assert code in BEYOND_SCHEMA
