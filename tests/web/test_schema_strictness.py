"""Where a schema stands in a request, whether it is strict, and how dropped keywords are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes import ByteTokenizer, FakeEngine
from tests.web.serving import exchange, post, serving
from trouper.protocol.grammar import FollowedGrammar, Grammar

Json = dict[str, Any]
SCHEMA: Json = {"type": "object", "properties": {"t": {"type": "array", "uniqueItems": True}}}
SAID = [{"role": "user", "content": "x"}]
FORMAT: Json = {"type": "json_schema", "name": "n", "schema": {"type": "string"}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class Dropping(ByteTokenizer):
    """Names as dropped what it compiles."""

    def __init__(self) -> None:
        self.compiled: list[Grammar] = []

    def compile_grammar(self, grammar: Grammar, timeout_s: float = 1.0) -> FollowedGrammar:
        self.compiled.append(grammar)
        return FollowedGrammar(grammar, (f"{grammar.param}.uniqueItems",))


def request(path: str, *, strict: bool = False, named: bool = False) -> Json:
    """Two tools, the second strict or not, and a forced call beside a format."""
    more = {"strict": True} if strict else {}
    names = ("a", "b")
    if path == MESSAGES:
        tools: list[Json] = [{"name": name, "input_schema": SCHEMA} for name in names]
        tools[1] |= more
        choice: Any = {"type": "tool", "name": "b"} if named else {"type": "any"}
        output = {"format": {"type": "json_schema", "schema": {"type": "string"}}}
        return {
            "messages": SAID,
            "max_tokens": 9,
            "tools": tools,
            "tool_choice": choice,
            "output_config": output,
        }
    functions: list[Json] = [{"name": name, "parameters": SCHEMA} for name in names]
    functions[1] |= more
    if path == RESPONSES:
        return {
            "input": "x",
            "tools": [{"type": "function", **function} for function in functions],
            "tool_choice": {"type": "function", "name": "b"} if named else "required",
            "text": {"format": FORMAT},
        }
    inner = {key: value for key, value in FORMAT.items() if key != "type"}
    return {
        "messages": SAID,
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": {"type": "function", "function": {"name": "b"}} if named else "required",
        "response_format": {"type": "json_schema", "json_schema": inner},
    }


async def compiled(path: str, body: Json, **server: Any) -> tuple[Grammar, str]:
    """The grammar of a request, and the header of what was ignored, in lower case."""
    tokenizer = Dropping()
    async with serving(
        FakeEngine(tokenizer=tokenizer), {"default_max_tokens": 3}, **server
    ) as served:
        status, headers, answer = await exchange(served, post(path, body))
    assert status == 200, answer
    [grammar] = tokenizer.compiled
    return grammar, headers.get("x-trouper-ignored", "")


PLACES = {
    CHAT: "tools.{}.function.parameters",
    RESPONSES: "tools.{}.parameters",
    MESSAGES: "tools.{}.input_schema",
}


@pytest.mark.parametrize("path", PLACES)
async def test_forced_tools_have_their_places_and_their_strictness(path: str) -> None:
    """A format beside them is for the answer after the call."""
    grammar, ignored = await compiled(path, request(path, strict=True))
    assert (grammar.kind, grammar.strict) == ("calls", False)
    places = [(call["param"], call["strict"]) for call in json.loads(grammar.source)]
    assert places == [(PLACES[path].format(0), False), (PLACES[path].format(1), True)]
    assert ignored == "tools.uniqueitems"
    grammar, _ = await compiled(path, request(path, named=True))
    [call] = json.loads(grammar.source)
    assert (call["param"], call["parameters"]) == (PLACES[path].format(1), SCHEMA)


@pytest.mark.parametrize("strict", [None, False, True])
async def test_a_format_is_as_strict_as_it_says(strict: bool | None) -> None:
    more = {} if strict is None else {"strict": strict}
    written = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **more}}
    chat = {"messages": SAID, "response_format": written}
    grammar, ignored = await compiled(CHAT, chat)
    assert (grammar.strict, ignored) == (
        strict is True,
        "response_format.json_schema.schema.uniqueitems",
    )
    grammar, _ = await compiled(RESPONSES, {"input": "x", "text": {"format": FORMAT | more}})
    assert grammar.strict is (strict is True)


@pytest.mark.parametrize("path", PLACES)
async def test_a_strict_server_drops_nothing(path: str) -> None:
    """And refuses what lenient ones name."""
    tokenizer = Dropping()
    async with serving(FakeEngine(tokenizer=tokenizer), strict=True) as served:
        status, _, answer = await exchange(served, post(path, request(path)))
    assert (tokenizer.compiled[0].strict, status) == (True, 400)
    assert b"unknown keyword 'tools.uniqueItems'" in answer


@pytest.mark.parametrize("compact", [False, True])
async def test_blanks_can_be_disabled(compact: bool) -> None:
    """Beside response_format, too."""
    outputs = {"disable_any_whitespace": compact}
    for body in (
        {"structured_outputs": {"json": SCHEMA, **outputs}},
        {"structured_outputs": outputs, "response_format": {"type": "json_object"}},
    ):
        grammar, _ = await compiled(CHAT, {"messages": SAID, **body})
        assert grammar.compact is compact
