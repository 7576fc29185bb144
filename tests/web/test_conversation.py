"""Messages of Anthropic's dialect as chat templates want them: pure."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.test_parsing import fault
from trouper.web.anthropic import message_history
from trouper.web.anthropic.message_history import continues
from trouper.web.anthropic.messages import CountRequest
from trouper.web.anthropic.thinking import CARRIES, Thinking, signature_of

Json = dict[str, Any]


def conversation_of(system: Any, messages: Any) -> tuple[Json, ...]:
    """As a request has it."""
    parsed = CountRequest.parse({"system": system, "messages": messages})
    return message_history.conversation_of(parsed.system, parsed.messages)


def thinking_of(asked: Any, max_tokens: int) -> Thinking:
    """As a request asks for it."""
    body = {"messages": [user("a")], "thinking": asked, "max_tokens": max_tokens}
    return CountRequest.parse(body).parsed_thinking


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def assistant(content: Any) -> Json:
    return {"role": "assistant", "content": content}


def use(call: str, name: str, **given: Any) -> Json:
    return {"type": "tool_use", "id": call, "name": name, "input": given}


def result(call: str, content: Any, **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **more}


def text(said: str) -> Json:
    return {"type": "text", "text": said}


def test_neighbours_of_one_role_are_one_turn_and_results_are_not() -> None:
    sent = [
        user("one"),
        user([text("two"), text("three")]),
        assistant([text("so"), use("c1", "f", a=1)]),
        assistant([use("c2", "g")]),
        user(
            [
                result("c1", "1"),
                result("c2", [text("2"), text("zwei")], is_error=True),
                text("and?"),
            ]
        ),
    ]
    turns = conversation_of(None, sent)
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool", "user"]
    assert turns[0]["content"] == "one\ntwo\nthree"
    assert turns[1]["content"] == "so"
    called = [(call["id"], call["function"]) for call in turns[1]["tool_calls"]]
    assert called == [
        ("c1", {"name": "f", "arguments": {"a": 1}}),
        ("c2", {"name": "g", "arguments": {}}),
    ]
    assert turns[2] == {"role": "tool", "tool_call_id": "c1", "content": "1"}
    assert turns[3] == {"role": "tool", "tool_call_id": "c2", "content": "Error: 2\nzwei"}
    assert turns[4]["content"] == "and?"


def test_what_a_system_prompt_means_for_the_api_is_not_for_the_model() -> None:
    """It changes with each request, so that no prompt would begin as the one before."""
    system = [
        text("x-anthropic-billing-header: cch=1a2b"),
        text("be brief"),
        text(""),
        text("be kind"),
    ]
    assert conversation_of(system, [user("a")])[0] == {
        "role": "system",
        "content": "be brief\nbe kind",
    }
    assert [turn["role"] for turn in conversation_of("", [user("a")])] == ["user"]


@pytest.mark.parametrize(
    ("last", "goes_on"),
    [
        (user("a"), False),
        (assistant("It is"), True),
        (assistant(""), False),
        (assistant([]), False),
    ],
)
def test_an_answer_goes_on_where_something_was_begun(last: Json, goes_on: bool) -> None:
    turns = conversation_of(None, [user("a"), last])
    assert continues(turns) is goes_on
    assert (turns[-1]["role"] == "assistant") is goes_on


def test_a_call_without_its_result_cannot_be_gone_on_with() -> None:
    turns = conversation_of(None, [user("a"), assistant([use("c1", "f")])])
    assert fault(continues, turns)[0] == "messages"


def test_thoughts_come_back_shown_or_carried() -> None:
    shown = {"type": "thinking", "thinking": "hm", "signature": "anybody's"}
    carried = {"type": "thinking", "thinking": "", "signature": signature_of("deep", omitted=True)}
    foreign = [
        {"type": "thinking", "thinking": "", "signature": sign}
        for sign in ("abcd", CARRIES + "!", "")
    ]
    hidden = {"type": "redacted_thinking", "data": "?"}
    [_, turn] = conversation_of(
        None, [user("a"), assistant([shown, carried, *foreign, hidden, text("so")])]
    )
    assert (turn["reasoning_content"], turn["content"]) == ("hm\ndeep", "so")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([user([{"type": "document", "source": {}}])], "messages.0.content.0"),
        ([assistant([{"type": "image", "source": {}}])], "messages.0.content.0"),
        ([user([use("c", "f")])], "messages.0.content.0"),
        ([user([{"type": "thinking", "thinking": "a"}])], "messages.0.content.0"),
        ([user([{"type": "text"}])], "messages.0.content.0.text"),
        ([user([text("a") | {"citations": [1]}])], "messages.0.content.0.citations"),
        ([user([result("c", [{"type": "document"}])])], "messages.0.content.0.content.0"),
        ([user("a") | {"name": "eva"}], "messages.0.name"),
        ([{"role": "robot", "content": "a"}], "messages.0.role"),
        ([user(3)], "messages.0.content"),
    ],
)
def test_what_a_model_would_not_read_is_refused_by_name(messages: list[Json], param: str) -> None:
    assert fault(conversation_of, None, messages)[0] == param


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (None, Thinking()),
        ({"type": "disabled"}, Thinking(budget=0)),
        ({"type": "adaptive"}, Thinking(enabled=True)),
        ({"type": "adaptive", "display": "omitted"}, Thinking(enabled=True, omitted=True)),
        ({"type": "enabled", "budget_tokens": 1024}, Thinking(enabled=True, budget=1024)),
        ({"type": "enabled", "budget_tokens": 1999}, Thinking(enabled=True, budget=1999)),
    ],
)
def test_how_much_may_be_thought(asked: Any, wanted: Thinking) -> None:
    assert thinking_of(asked, 2000) == wanted


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 1023}, "thinking.budget_tokens"),
        ({"type": "enabled"}, "thinking.budget_tokens"),
        ({"type": "disabled", "budget_tokens": 1024}, "thinking.budget_tokens"),
        ({"type": "much"}, "thinking.type"),
        (True, "thinking"),
    ],
)
def test_what_cannot_be_thought(asked: Any, param: str) -> None:
    assert fault(thinking_of, asked, 2000)[0] == param
