"""Bodies that nobody would send, on every endpoint that takes one: a right answer or a right error,
while another's stream goes on.

TROUPER_LONG_TESTS=1 sends many more.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import attrs
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.fakes import FakeEngine
from tests.web.serving import PATIENCE_S, Served, a_stream_that_goes_on, pace, serving
from tests.web.test_openapi import STREAMED, data_of, described, operations, request_of, validator

Json = dict[str, Any]
LONG = "TROUPER_LONG_TESTS" in os.environ
ROUNDS = 40 if LONG else 1
EXAMPLES = 200 if LONG else 8
MIB = 2**20
REFUSALS = (400, 404, 413)
BRIEF = {"default_max_tokens": 3}
"""The answers are of no interest; what was sent is."""


# -- what is sent --------------------------------------------------------------------------------

DEEP = "@deep@"
"""Stands for an array in an array in an array: a level for each character of a stack that
overflows."""
odd_text = st.sampled_from(
    ["", "\ud800", "\udfff\ud800", "\x00", "wizard", "x" * 5000, "1", "true", "null", DEEP, "é😀"]
)
odd_number = st.sampled_from(
    [
        0,
        -1,
        1,
        2,
        5.0,
        0.5,
        -0.0,
        129,
        2**31,
        2**32,
        2**53,
        2**63,
        -(2**63),
        2**64,
        10**30,
        10**400,
        1e308,
        5e-324,
    ]
)
no_number = st.sampled_from([float("nan"), float("inf"), float("-inf")])
leaves = st.none() | st.booleans() | odd_number | odd_text | st.text(max_size=8)
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(odd_text | st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)

RICH: dict[str, list[Json]] = {
    "/v1/chat/completions": [
        {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "content": "3", "tool_call_id": "1"},
            ],
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
            ],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "stop": ["a", "b"],
            "logit_bias": {"7": 1.5},
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"enable_thinking": False},
            "stop_token_ids": [1],
        },
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object"}},
            },
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ],
    "/v1/completions": [
        {
            "prompt": ["a", "b"],
            "n": 2,
            "best_of": 3,
            "logprobs": 1,
            "seed": 1,
            "structured_outputs": {"regex": "a"},
        },
        {"prompt": [[97, 98], [99]], "stream": True, "echo": True, "guided_choice": ["a", "b"]},
    ],
    "/v1/responses": [
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "3"},
            ],
            "instructions": "Be kind.",
            "tools": [
                {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
            ],
            "tool_choice": {"type": "function", "name": "f"},
            "reasoning": {"effort": "low"},
            "metadata": {"a": "b"},
            "store": False,
        },
        {
            "input": "Hi",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "stream": True,
        },
    ],
    "/v1/messages": [
        {
            "max_tokens": 3,
            "system": [
                {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": "3"}],
                },
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "f"},
            "stop_sequences": ["a"],
            "metadata": {"user_id": "me"},
            "stream": True,
        },
    ],
    "/tokenize": [{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {}}],
}
"""Beside the examples of the document, which every endpoint has."""


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Of everything inside."""
    if path:
        yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], by: object) -> Any:
    """The same with something else at that place."""
    if not path:
        return by
    [first, *rest] = path
    inner = {**value} if isinstance(value, dict) else [*value]
    inner[first] = replaced(inner[first], tuple(rest), by)
    return inner


def as_bytes(body: object) -> bytes:
    deep = "[" * 3000 + "]" * 3000
    return json.dumps(body).replace(json.dumps(DEEP), deep).encode()


@st.composite
def bodies(draw: st.DrawFn, own: list[Json], names: list[str]) -> bytes:
    """A good one with up to three things wrong, or one that is no JSON."""
    body: Any = draw(st.sampled_from(own))
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            path = draw(st.sampled_from([*places(body)]) if [*places(body)] else st.just(()))
            body = replaced(body, path, draw(anything))
        elif isinstance(body, dict):
            body = {
                **body,
                draw(st.sampled_from([*names, "made_up", "\ud800", "self"])): draw(
                    anything | no_number
                ),
            }
    data = as_bytes(body)
    match draw(st.integers(0, 11)):
        case 0:
            return data[: draw(st.integers(0, len(data)))]
        case 1:
            place = draw(st.integers(0, len(data)))
            return data[:place] + draw(st.binary(min_size=1, max_size=3)) + data[place:]
        case _:
            return data


def monsters() -> Iterator[bytes]:
    """Eight MiB each, and one that is more than is read."""
    size = 8 * MIB
    yield b'{"prompt": "' + b"x" * size + b'"}'
    yield b'{"prompt": [' + b"7," * (size // 2) + b"7]}"
    yield b'{"tokens": [' + b"7," * (size // 2) + b"7]}"
    yield (
        b'{"messages": ['
        + b'{"role":"user","content":"x"},' * (size // 31)
        + b'{"role":"user","content":"x"}]}'
    )
    yield (
        b'{"input": ['
        + b'{"role":"user","content":"x"},' * (size // 31)
        + b'{"role":"user","content":"x"}]}'
    )
    yield b"{" + b",".join(b'"k%d":0' % n for n in range(size // 12)) + b"}"
    yield b"[" * size
    yield b'{"messages":' * (size // 12)
    yield b" " * size
    yield b"\xff" * size
    yield b'{"seed": ' + b"9" * size + b"}"
    yield b"x" * (33 * MIB)


# -- what comes back -----------------------------------------------------------------------------


@attrs.frozen
class Target:
    """An endpoint that takes a body, and what it says of its answers."""

    path: str
    names: list[str]
    own: list[Json]
    error: Draft202012Validator
    answer: Draft202012Validator
    event: Draft202012Validator | None
    port: int

    @classmethod
    def of(cls, document: Json, path: str, operation: Json, port: int) -> Target:
        content = operation["requestBody"]["content"]["application/json"]
        responses = operation["responses"]
        answers = responses["200"]["content"]
        stream = answers.get(STREAMED)
        return cls(
            path,
            [*request_of(document, path)["properties"]],
            [example["value"] for example in content["examples"].values()] + RICH.get(path, []),
            validator(document, responses["400"]["content"]["application/json"]["schema"]),
            validator(document, answers["application/json"]["schema"]),
            validator(document, data_of(stream["schema"])) if stream else None,
            port,
        )

    def send(self, body: bytes) -> None:
        """From a thread."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("POST", self.path, body, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                self.check(response.status, response.headers.get_content_type(), response.read())
        finally:
            connection.close()

    def check(self, status: int, kind: str, said: bytes) -> None:
        if status != 200:
            assert status in REFUSALS, (status, said)
            self.error.validate(json.loads(said))
        elif kind == STREAMED:
            assert self.event is not None
            for line in said.split(b"\n"):
                if line.startswith(b"data: {"):
                    self.event.validate(json.loads(line[6:]))
        elif len(said) < MIB:  # Checking millions of tokens one by one takes minutes.
            self.answer.validate(json.loads(said))


async def targets(served: Served) -> list[Target]:
    """What has examples of its body, and answers in JSON: files are forms, and what loads and
    unloads models would take the model away."""
    document = await described(served)
    return [
        Target.of(document, path, operation, served.port)
        for method, path, operation in operations(document)
        if "examples"
        in operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        and "application/json" in operation["responses"]["200"]["content"]
    ]


def fuzz(target: Target) -> None:
    @settings(
        max_examples=EXAMPLES,
        database=None,
        derandomize=not LONG,
        suppress_health_check=list(HealthCheck),
    )
    @given(bodies(target.own, target.names))
    def send(body: bytes) -> None:
        target.send(body)

    send()


async def beside_a_stream(work: Callable[[Target], None], *, strict: bool = False) -> None:
    async with serving(FakeEngine(before_step=pace), BRIEF, strict=strict) as served:
        found = await targets(served)
        assert {target.path for target in found} >= RICH.keys()
        for target in found:
            async with a_stream_that_goes_on(served):
                await trio.to_thread.run_sync(work, target)
        assert served.runtime.health().ready


@pytest.mark.parametrize("_round", range(ROUNDS))
@pytest.mark.parametrize("strict", [False, True])
async def test_bodies_with_something_wrong(_round: int, strict: bool) -> None:
    await beside_a_stream(fuzz, strict=strict)


async def test_bodies_that_are_no_object() -> None:
    none = [
        b"",
        b"[]",
        b"{",
        b'{"a":',
        b"3",
        b'"x"',
        b"null",
        b"[" * 5000,
        b"\xff\xfe",
        "\ufeff{}".encode(),
        b"{} {}",
    ]
    own = [
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt": 1e999}',
        b'{"a": 1, "a": 2}',
        b'{"\\ud800": 1}',
    ]

    def work(target: Target) -> None:
        for body in none + own:
            target.send(body)

    await beside_a_stream(work)


async def test_bodies_of_eight_mib() -> None:
    turn, all_of_them = count(), [*monsters()]

    def work(target: Target) -> None:
        """In the short version each endpoint meets a sixth of them."""
        for monster in all_of_them if LONG else all_of_them[next(turn) % 6 :: 6]:
            target.send(monster)

    await beside_a_stream(work)
