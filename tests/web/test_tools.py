"""Calls of tools, as a forced answer's text becomes them."""

from __future__ import annotations

import json

import pytest

from tests.fakes import ByteTokenizer
from trouper.web.output.tool_calls import Tools

TOOL = {"type": "function", "function": {"name": "weigh", "parameters": {"type": "object"}}}
FORCED = Tools((TOOL,), (TOOL,))


@pytest.mark.parametrize(
    "arguments", ["{}", '{"grams": 1e999}', '{"n": -0, "m": 1' + "0" * 400 + "}", '{"a": "\\u0000", "b": [null]}']
)
def test_a_forced_call_keeps_whatever_arguments_json_allows(arguments: str) -> None:
    [(name, given)] = FORCED.calls(f'{{"name": "weigh", "arguments": {arguments}}}', ByteTokenizer())
    assert (name, json.loads(given)) == ("weigh", json.loads(arguments))


@pytest.mark.parametrize("text", ["", '{"name": "weigh", "argu', "[]", '{"name": 1, "arguments": {}}'])
def test_what_was_cut_off_is_no_call(text: str) -> None:
    assert FORCED.calls(text, ByteTokenizer()) == ()
