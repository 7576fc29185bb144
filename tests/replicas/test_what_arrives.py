"""Every parameter of docs/parameters.md arrives, also where smg is behind HAProxy. Behind smg alone
those that are named here are lost."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from examples.replicas import haproxy
from tests.parameters import TABLES, Table
from tests.replicas.recording_server import (
    MODEL,
    RecordingServer,
    behind,
    needs_haproxy,
    needs_smg,
    recording_server,
    running,
)
from tests.test_process import until
from trouper.system.ports import free_ports
from trouper.web.http.request_schema import components_of, schema_of

NEEDED: Mapping[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "x"}],
    "input": "x",
    "prompt": "x",
    "max_tokens": 2048,
    "query": "x",
    "documents": ["x"],
    "text_1": "x",
    "text_2": "x",
    "input_prefix": "x",
    "input_suffix": "x",
    "input_file_id": "file-a",
    "endpoint": "/v1/responses",
    "completion_window": "24h",
}
FUNCTION = {"name": "x", "parameters": {"type": "object"}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
TOOLS = [{"type": "function"} | FUNCTION]
MESSAGE_TOOLS = [{"name": "x", "input_schema": {"type": "object"}}]
TOGETHER: Mapping[str, Mapping[str, Any]] = {
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "response_format": {"response_format": {"type": "json_object"}},
    "/v1/chat/completions tools": {"tools": CHAT_TOOLS},
    "/v1/chat/completions tool_choice": {"tools": CHAT_TOOLS, "tool_choice": "auto"},
    "/v1/responses tools": {"tools": TOOLS},
    "/v1/responses tool_choice": {"tools": TOOLS, "tool_choice": "auto"},
    "/v1/responses top_logprobs": {"top_logprobs": 2},
    "/v1/responses stream_options": {
        "stream": True,
        "stream_options": {"include_obfuscation": False},
    },
    "/v1/responses reasoning": {"reasoning": {"effort": "low"}},
    "/v1/messages tools": {"tools": MESSAGE_TOOLS},
    "/v1/messages tool_choice": {"tools": MESSAGE_TOOLS, "tool_choice": {"type": "auto"}},
    "/v1/messages thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
}
"""What goes with a parameter that does not stand alone, and values that are no simple ones."""
LOST_BY_SMG: Mapping[str, set[str]] = {
    "/v1/responses": {
        "adapters",
        "cache_salt",
        "chat_template_kwargs",
        "dry_allowed_length",
        "dry_base",
        "dry_multiplier",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "ignore_eos",
        "logit_bias",
        "min_tokens",
        "seed",
        "speculation",
        "stop_token_ids",
        "thinking_token_budget",
        "top_n_sigma",
        "typical_p",
        "xtc_probability",
        "xtc_threshold",
    },
    "/v1/embeddings": {"priority", "prompt_name"},
    "/v1/rerank": {
        "cache_salt",
        "instruction",
        "model",
        "priority",
        "raw_scores",
        "return_text",
        "texts",
        "top_n",
    },
}
"""Refused with 400 in responses, left out in the others"""
ROUTERS = (pytest.param("haproxy", marks=needs_haproxy), pytest.param("smg", marks=needs_smg))
PATHS_OF_SMG = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/messages",
)


def value_of(schema: Mapping[str, Any], within: Mapping[str, Any]) -> Any:
    """Return the simplest value that a schema allows and that is not null."""
    name = schema.get("$ref", "").rpartition("/")[2]
    if name in within:
        return value_of(within[name], within)
    if "anyOf" in schema:
        return value_of(next(one for one in schema["anyOf"] if one.get("type") != "null"), within)
    kinds = schema.get("type", "string")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if kind == "array":
        return [value_of(schema.get("items", {}), within)]
    if kind == "object":
        needed = schema.get("required", ())
        return {name: value_of(schema["properties"][name], within) for name in needed}
    number = max(schema.get("minimum", 1), min(1, schema.get("maximum", 1)))
    simple = {"integer": number, "number": number, "boolean": True}
    return schema["enum"][0] if "enum" in schema else simple.get(kind, "x")


def bodies(table: Table) -> Iterator[tuple[str, dict[str, Any]]]:
    """A body for each parameter that works, with that and with what a request needs."""
    schema, within = schema_of(table.request), components_of([table.request])
    required = {*schema.get("required", ()), "model", "input", "documents"}
    names = required & {*schema["properties"]} - {*table.request.unsupported}
    minimal = {name: NEEDED.get(name, "x") for name in sorted(names)}
    for name, verdict in table.verdicts.items():
        if verdict.startswith("works"):
            alone = {name: NEEDED.get(name, value_of(schema["properties"][name], within))}
            special = TOGETHER.get(f"{table.path} {name}", TOGETHER.get(name, alone))
            yield name, minimal | {**special}


def send(port: int, path: str, data: bytes, **headers: str) -> int:
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("POST", path, data, {"Content-Type": "application/json"} | headers)
        with connection.getresponse() as response:
            response.read()
            return response.status


def lost(port: int, server: RecordingServer, table: Table) -> set[str]:
    """Names of parameters that do not arrive as they were sent."""
    names = set()
    for name, body in bodies(table):
        server.arrived.clear()
        send(port, table.path, json.dumps(body).encode())
        arrived = [json.loads(one.body) for one in server.arrived if one.method == "POST"]
        # smg sends again whatever has an answer that it cannot read.
        if not arrived or any(one.get(name) != body[name] for one in arrived):
            names.add(name)
    return names


@pytest.mark.parametrize("router", ROUTERS)
def test_every_byte_arrives(router: str, tmp_path: Path) -> None:
    with behind(tmp_path, router, 1) as (port, [server]):
        assert {table.path: lost(port, server, table) for table in TABLES} == {
            table.path: set() for table in TABLES
        }
        large = json.dumps({"input": "ü\n" * 3_000_000}).encode()
        packed = gzip.compress(large)
        server.arrived.clear()
        assert send(port, "/v1/embeddings?a=%20b", large) == 200
        assert send(port, "/v1/messages?beta=true", packed, **{"Content-Encoding": "gzip"}) == 200
        assert [(one.path, one.body) for one in server.arrived] == [
            ("/v1/embeddings?a=%20b", large),
            ("/v1/messages?beta=true", packed),
        ]


@needs_smg
@pytest.mark.long
def test_what_arrives_behind_smg_alone(tmp_path: Path) -> None:
    """Therefore HAProxy sends chats and completions to it, and nothing else."""
    with behind(tmp_path, "smg alone", 1) as (port, [server]):
        missing = {
            table.path: lost(port, server, table) for table in TABLES if table.path in PATHS_OF_SMG
        }
        others = [table for table in TABLES if table.path not in PATHS_OF_SMG]
        for table in others:
            assert lost(port, server, table) == {name for name, _ in bodies(table)}
    assert {path: names for path, names in missing.items() if names} == LOST_BY_SMG


PROMPT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


@needs_smg
def test_smg_gets_prompts_of_no_named_conversation_and_nothing_else(tmp_path: Path) -> None:
    """A name for the server is HAProxy's own."""
    with behind(tmp_path, "smg", 1) as (port, [server]):

        def past_smg(path: str, body: Mapping[str, Any], **headers: str) -> bool:
            server.arrived.clear()
            assert send(port, path, json.dumps(body).encode(), **headers) == 200
            return server.arrived[-1].server == "a"

        assert not past_smg("/v1/chat/completions", PROMPT)
        assert not past_smg("/v1/completions", {"model": MODEL, "prompt": "x"})
        assert past_smg("/v1/chat/completions", PROMPT, **{"x-session-id": "1"})
        assert past_smg("/v1/chat/completions", PROMPT | {"prompt_cache_key": "1"})
        assert past_smg("/v1/messages", PROMPT)
        assert past_smg("/v1/responses", {"model": MODEL, "input": "x", "client_metadata": {}})


def is_named(server: RecordingServer) -> bool:
    """HAProxy gave a name for it: it went past smg's backend."""
    return server.arrived[-1].server == "a"


@needs_haproxy
def test_without_an_smg_that_answers_prompts_go_to_the_servers(tmp_path: Path) -> None:
    with recording_server() as server:
        port, nobody = free_ports(2)
        command = haproxy(port, [server.url], tmp_path, nobody)
        with running(command, port, 1):
            body = json.dumps(PROMPT).encode()
            assert send(port, "/v1/chat/completions", body) == 200
            until(lambda: send(port, "/v1/chat/completions", body) == 200 and is_named(server))
