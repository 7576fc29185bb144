"""A message of Anthropic's dialect: why it ended, what it counts, and which calls it holds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import ByteTokenizer
from trouper.protocol.replies import Delta, Finished
from trouper.web.anthropic.message_dialect import MessageDialect
from trouper.web.output.dialect import Choice, Usage
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.tool_calls import Tools

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def call(arguments: str) -> str:
    return '<call>{"name": "f", "arguments": ' + arguments + "}</call>"


def message(
    text: str, finished: Finished, *, omitted: bool = False, cut: bool = False, silent: bool = False
) -> Any:
    parser = OutputParser(Tools((TOOL,)), ByteTokenizer(), thinks=False)
    shape = MessageDialect("r", "m", parser, omitted=omitted, cut=cut, silent=silent)
    deltas = (Delta(text, ()),)
    return shape.body([Choice(text, (), (), finished, Usage(10, 7, 4), (1,), deltas=deltas)])


@pytest.mark.parametrize(
    ("text", "finished", "reason", "sequence"),
    [
        ("a", Finished("stop", 7), "end_turn", None),
        ("a", Finished("stop", 7, "END"), "stop_sequence", "END"),
        ("a", Finished("stop", 7, 98), "end_turn", None),
        ("a", Finished("length", 7), "max_tokens", None),
        (call('{"a": 1}'), Finished("stop", 7), "tool_use", None),
        (call('{"a": 1}') + "and", Finished("length", 7), "max_tokens", None),
        (call("[1]"), Finished("stop", 7), "end_turn", None),
    ],
)
def test_why_it_ended(text: str, finished: Finished, reason: str, sequence: str | None) -> None:
    """A client runs the tools of an answer that asks for it: not those of one that was cut."""
    said = message(text, finished)
    assert (said["stop_reason"], said["stop_sequence"]) == (reason, sequence)


def test_a_context_that_ends_is_told_apart_from_a_limit() -> None:
    assert (
        message("a", Finished("length", 7), cut=True)["stop_reason"]
        == "model_context_window_exceeded"
    )


def test_what_came_from_the_cache_is_no_input() -> None:
    assert message("a", Finished("stop", 7))["usage"] == {
        "input_tokens": 6,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert message("a", Finished("length", 7), silent=True)["usage"]["output_tokens"] == 0


def test_a_call_has_an_object_and_what_has_none_is_text() -> None:
    [block] = message(call('{"a": 1}'), Finished("stop", 7))["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "f", {"a": 1})
    assert block["id"].startswith("toolu_")
    [other] = message(call("[1]"), Finished("stop", 7))["content"]
    assert (other["type"], other["text"]) == ("text", call("[1]"))
