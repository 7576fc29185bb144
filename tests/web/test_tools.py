"""Calls of tools, as a forced answer's text becomes them."""

from __future__ import annotations

import pytest

from tests.fakes import ByteTokenizer
from tests.output.samples import parse_complete
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.parsed_delta import ParsedOutput
from trouper.web.output.tool_calls import Tools

TOOL = {"type": "function", "function": {"name": "weigh", "parameters": {"type": "object"}}}
FORCED = Tools((TOOL,), (TOOL,))


def parsed(text: str) -> ParsedOutput:
    return parse_complete(OutputParser(FORCED, ByteTokenizer(), thinks=False), text, "length")


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"grams": 1e999}',
        '{"n": -0, "m": 1' + "0" * 400 + "}",
        '{"a": "\\u0000", "b": [null]}',
    ],
)
def test_a_forced_call_keeps_whatever_arguments_json_allows(arguments: str) -> None:
    [call] = parsed(f'{{"name": "weigh", "arguments": {arguments}}}').calls
    assert (call.name, call.arguments) == ("weigh", arguments)


@pytest.mark.parametrize("text", ["", "[", '{"name": "weigh", "argu', "[]"])
def test_what_was_cut_off_is_no_call_and_the_servers_wrapper_no_text(text: str) -> None:
    assert parsed(text) == ParsedOutput("", "", (), "length")


def test_what_is_no_wrapper_of_a_call_is_text() -> None:
    text = '{"name": 1, "arguments": {}}'
    assert parsed(text) == ParsedOutput(text, "", (), "length")


def test_a_call_that_was_cut_off_is_not_completed() -> None:
    """Half of a file must not look like all of it."""
    [call] = parsed('{"name": "weigh", "arguments": {"text": "ha').calls
    assert call.arguments == '{"text": "ha'
