"""A format of the answer beside tools that may be called: agents that ask for an object in the end
offer their tools with it in every turn."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from tests.fakes import ByteTokenizer, FakeEngine
from tests.web.responses import TOOL, saying
from tests.web.serving import exchange, post, serving
from trouper.protocol.grammar import Grammar
from trouper.protocol.problems import RequestFailed
from trouper.protocol.requests import Generate, TextPrompt
from trouper.protocol.sampling import Sampling
from trouper.web.http.leniency import ReadPast
from trouper.web.http.request_body import refuse
from trouper.web.output.call_or_answer import HARMONY, with_calls
from trouper.web.output.tool_calls import NO_TOOLS, Tools
from trouper.web.output.tool_forms import ToolForm, ToolOffer

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "n", "schema": SCHEMA}
FUNCTION = {key: value for key, value in TOOL.items() if key != "type"}
SAID = [{"role": "user", "content": "x"}]
CALL = '<call>{"name": "f", "arguments": {"a": 1}}</call>'
REQUESTS: dict[str, Json] = {
    "/v1/chat/completions": {
        "messages": SAID,
        "tools": [{"type": "function", "function": FUNCTION}],
        "response_format": {"type": "json_schema", "json_schema": NAMED},
    },
    "/v1/responses": {
        "input": "x",
        "tools": [TOOL],
        "text": {"format": {"type": "json_schema", **NAMED}},
    },
    "/v1/messages": {
        "messages": SAID,
        "max_tokens": 99,
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}


def grammars(engine: FakeEngine) -> list[Grammar | None]:
    return [admit.grammar for plan in engine.plans_seen for admit in plan.admit]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
async def test_an_answer_is_a_call_or_follows_the_format(path: str, strict: bool) -> None:
    for text, found in ((CALL, '"name": "f"'), ('{"a": 2}', json.dumps('{"a": 2}'))):
        engine = saying(text)
        async with serving(engine, strict=strict) as served:
            status, headers, said = await exchange(served, post(path, REQUESTS[path]))
        assert status == 200, said
        assert "x-trouper-ignored" not in headers
        answer = json.loads(said)
        choices = answer.get("choices") or answer.get("output") or answer["content"]
        assert found in json.dumps(choices) and "<call>" not in json.dumps(choices)
        [grammar] = grammars(engine)
        assert grammar is not None
        assert (grammar.kind, json.loads(grammar.source), grammar.calls) == (
            "json_schema",
            SCHEMA,
            ("<call>",),
        )
        assert (grammar.call_names, grammar.call_key) == (("f",), "")


@attrs.define
class Parsing(ByteTokenizer):
    tool_parser: str | None = None
    calling: tuple[str, str] | None = None  # type: ignore[assignment]


OFFERED = Tools.of([ToolOffer(ToolForm("f"), {"parameters": SCHEMA})])
OBJECT = Grammar("json_object")


def given(grammar: Grammar | None, count: int = 1) -> list[Generate]:
    generate = Generate(
        request_id="id", prompt=TextPrompt("x"), sampling=Sampling(), max_tokens=1, grammar=grammar
    )
    return [generate] * count


def changed(
    grammar: Grammar, parser: str, calling: tuple[str, str] | None = None
) -> tuple[Grammar | None, list[str]]:
    past = ReadPast()
    [generate] = with_calls(given(grammar), OFFERED, Parsing(parser, calling), past)
    return generate.grammar, [*past.names]


@pytest.mark.parametrize(
    ("parser", "calling", "starts", "key"),
    [
        ("hermes", None, ("<tool_call>",), "arguments"),
        ("llama3_json", None, ("", "<|python_tag|>"), "parameters"),
        ("mistral", None, ("[TOOL_CALLS]",), ""),
        ("harmony", None, HARMONY, ""),
        ("gemma4", ("<start>", "<end>"), ("<start>",), ""),
    ],
)
def test_by_the_marker_of_the_format(
    parser: str, calling: tuple[str, str] | None, starts: tuple[str, ...], key: str
) -> None:
    for grammar in (
        OBJECT,
        Grammar("choice", '["yes"]'),
        Grammar("json_schema", '{"type": "array"}'),
    ):
        channels = parser == "harmony"
        expected = attrs.evolve(
            grammar, calls=starts, call_names=("f",), call_key=key, channels=channels
        )
        assert changed(grammar, parser, calling) == (expected, [])


@pytest.mark.parametrize(
    ("grammar", "parser", "calling"),
    [
        (Grammar("regex", "a+"), "hermes", None),
        (Grammar("lark", 'start: "a"'), "hermes", None),
        (Grammar("json_schema", "false"), "hermes", None),
        (OBJECT, "pythonic", ("", "")),
    ],
)
def test_what_leaves_no_room_for_calls_is_named(
    grammar: Grammar, parser: str, calling: tuple[str, str] | None
) -> None:
    assert changed(grammar, parser, calling) == (grammar, ["tools"])
    with pytest.raises(RequestFailed) as refused:
        with_calls(given(grammar), OFFERED, Parsing(parser, calling), refuse)
    assert (refused.value.problem.status, refused.value.problem.param) == (400, "tools")


@pytest.mark.parametrize("tools", [NO_TOOLS, OFFERED])
def test_harmony_has_the_format_in_its_final_channel(tools: Tools) -> None:
    """Found by review: the grammar held from the first token on, where this model writes the header
    of a message."""
    for grammar in (OBJECT, Grammar("regex", "a+"), Grammar("lark", 'start: "a"')):
        [generate] = with_calls(given(grammar), tools, Parsing("harmony"), ReadPast())
        assert generate.grammar is not None and generate.grammar.channels
    [forced] = with_calls(given(OBJECT), OFFERED.requiring(), Parsing("harmony"), refuse)
    assert forced.grammar == OBJECT, "a call that is forced is no message"


def test_what_has_no_choice_stays_as_it_is() -> None:
    for tools, grammar in ((NO_TOOLS, OBJECT), (OFFERED.requiring(), OBJECT), (OFFERED, None)):
        requests = given(grammar, 2)
        assert with_calls(requests, tools, Parsing("hermes"), refuse) == tuple(requests)
