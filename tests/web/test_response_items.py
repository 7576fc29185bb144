"""Items of a responses conversation as messages for a template: pure."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.test_parsing import fault
from trouper.web.responses import items
from trouper.web.responses.items import check_outputs, messages_of
from trouper.web.responses.response_request import parse_response

Json = dict[str, Any]


def items_of(given: Any, stored: dict[str, Json]) -> tuple[Json, ...]:
    """As a request's input becomes them."""
    value = parse_response({"input": given}).request.input
    assert value is not None
    return items.items_of(value, stored)


def message(role: str, text: str) -> Json:
    return {"role": role, "content": text}


def call(name: str, arguments: str = "{}") -> Json:
    return {"type": "function_call", "call_id": f"c-{name}", "name": name, "arguments": arguments}


def output(name: str, said: Any) -> Json:
    return {"type": "function_call_output", "call_id": f"c-{name}", "output": said}


def thought(**parts: str) -> Json:
    kinds = {"summary": "summary_text", "content": "reasoning_text"}
    return {
        "type": "reasoning",
        **{name: [{"type": kinds[name], "text": text}] for name, text in parts.items()},
    }


def heard(*given: Json, instructions: str | None = None) -> list[Json]:
    return [*messages_of(instructions, items_of([*given], {}))]


def test_one_turn_is_one_message() -> None:
    turns = heard(
        message("user", "a"),
        thought(summary="s", content="hm"),
        thought(summary="more"),
        message("assistant", "so"),
        call("f", '{"x": 1}'),
        call("g", ""),
        output("f", "1"),
        output("g", [{"type": "input_text", "text": "2"}]),
        message("assistant", "done"),
        message("developer", "be brief"),
        instructions="be kind",
    )
    assert [turn["role"] for turn in turns] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "system",
    ]
    first = turns[2]
    assert (first["content"], first["reasoning_content"]) == ("so", "hmmore"), (
        "what was thought, else its summary"
    )
    assert [one["function"] for one in first["tool_calls"]] == [
        {"name": "f", "arguments": {"x": 1}},
        {"name": "g", "arguments": {}},
    ]
    assert [(turn["content"], turn["tool_call_id"]) for turn in turns[3:5]] == [
        ("1", "c-f"),
        ("2", "c-g"),
    ]
    assert (turns[5]["content"], turns[6]["content"]) == ("done", "be brief")


@pytest.mark.parametrize(
    ("given", "contents"),
    [
        ([message("assistant", "one"), message("assistant", "two")], ["one", "two"]),
        ([call("f"), message("assistant", "late")], ["", "late"]),
        ([message("assistant", "one"), thought(content="late")], ["one", ""]),
    ],
)
def test_what_comes_out_of_order_begins_another_message(
    given: list[Json], contents: list[str]
) -> None:
    """Nothing that was said is lost."""
    turns = heard(message("user", "a"), *given)
    assert [turn["content"] for turn in turns[1:]] == contents


def test_reasoning_that_another_server_has_encrypted_is_none() -> None:
    """An empty thought would tell the model not to think."""
    encrypted: Json = {"type": "reasoning", "summary": [], "encrypted_content": None}
    turns = heard(message("user", "a"), encrypted, message("assistant", "so"), encrypted, call("f"))
    assert [turn["content"] for turn in turns] == ["a", "so"]
    assert "reasoning_content" not in turns[1] and turns[1]["tool_calls"]


def test_an_output_answers_a_call_that_came_before() -> None:
    both = items_of([call("f"), output("f", "1")], {})
    check_outputs([], both)
    check_outputs(both[:1], both[1:])
    assert fault(check_outputs, [], both[1:])[0] == "input.0.call_id"
    assert fault(check_outputs, [], both[::-1])[0] == "input.0.call_id"


def test_an_item_is_referred_to_once() -> None:
    """Else a short request becomes a prompt of any length."""
    [stored] = items_of("a", {})
    refer = {"type": "item_reference", "id": stored["id"]}
    assert items_of([refer, message("user", "b")], {stored["id"]: stored})[0] is stored
    assert fault(items_of, [refer, refer], {stored["id"]: stored})[0] == "input.1.id"
    assert fault(items_of, [refer, {"id": stored["id"]}], {stored["id"]: stored})[0] == "input.1.id"


class Unread(str):
    """A text that nobody may read character by character."""

    __slots__ = ()

    def __iter__(self) -> Any:
        raise AssertionError


def test_a_text_holds_no_references_and_is_not_searched_for_any() -> None:
    assert items.references_of(Unread("a")) == []
