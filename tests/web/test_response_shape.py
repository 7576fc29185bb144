"""A response in the making, without a server: whatever a model says, however it is cut, events and
object agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.fakes import ByteTokenizer
from trouper.actors.runtime.answer import Answer, TimeLimits
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Accepted, Delta, Finished, Reply, TokenLogprobs
from trouper.protocol.requests import Timeouts
from trouper.web.http.request_schema import ref
from trouper.web.output.dialect import Choice, Json, Usage
from trouper.web.output.output_parser import OutputParser
from trouper.web.output.tool_calls import Tools
from trouper.web.responses.response_events import ResponseDialect, head_of
from trouper.web.responses.response_request import parse_response
from trouper.web.responses.schemas import COMPONENTS
from trouper.web.streaming.event_log import EventLog

WORDS = ByteTokenizer()
TOOL = {"type": "function", "function": {"name": "f"}}
HEAD = head_of(parse_response({"input": "x"}), "resp_1", "fake", stored=True)
VALIDATORS = {
    name: Draft202012Validator({"components": {"schemas": COMPONENTS}, **ref(name)})
    for name in ("ResponseObject", "ResponseEvent")
}
CALL = '<call>{"name": "f", "arguments": {}}</call>'
SAID = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<call>", "</call>", CALL, "a", "<", "\n", "b c", "", "{}"]
    ),
    max_size=12,
)
ENDS = st.sampled_from(["stop", "length", "failed", "cancelled"])


def answer_of(tokens: int) -> Answer:
    _, replies = trio.open_memory_channel[Reply](1)
    answer = Answer("r", Accepted((1, 2), 99), replies, TimeLimits(Timeouts(), 0.0))
    answer.completion_tokens = tokens
    return answer


def shape_of(answer: Answer, log: EventLog | None = None) -> ResponseDialect:
    parser = OutputParser(Tools((TOOL,)), WORDS, thinks=False)
    return ResponseDialect(HEAD, WORDS, parser, answer, log=log)


def deltas_of(pieces: Sequence[str]) -> list[Delta]:
    return [Delta(text, (97,), (TokenLogprobs(97, -1.0),)) for text in pieces]


def events_of(data: bytes) -> list[Json]:
    events = []
    for event in data.decode().split("\n\n")[:-1]:
        name, body = event.split("\n")
        events.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@given(SAID, ENDS)
def test_events_are_the_response(pieces: list[str], end: str) -> None:
    answer, log = answer_of(len(pieces)), EventLog()
    shape = shape_of(answer, log)
    said = shape.opening(0, answer) + b"".join(
        shape.text(0, delta, answer) for delta in deltas_of(pieces)
    )
    VALIDATORS["ResponseObject"].validate(json.loads(json.dumps(shape.response())))
    match end:
        case "stop" | "length" as reason:
            said += shape.ending(0, Finished(reason, len(pieces)), answer)
        case "failed":
            said += shape.failure(Problem(504, "too late", code="token_timeout"))
        case _:
            shape.cancel()
            assert shape.text(0, Delta("more", (1,)), answer) == b""
            said += shape.failure(Problem(499, "cancelled", code="cancelled"))
    events = events_of(said)
    assert b"".join(log.since(0, 10**6)) == said and log.over
    response = shape.response()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        VALIDATORS["ResponseEvent"].validate(event)
    assert events[-1]["response"] == response
    assert response["status"] == {"stop": "completed", "length": "incomplete"}.get(end, end)
    check_items(events, response["output"])


def check_items(events: Sequence[Json], output: Sequence[Json]) -> None:
    """Added, then written, then done; one after the other; and done is what the response has."""
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == list(output)
    assert [event["output_index"] for event in done] == list(range(len(output)))
    assert len({item["id"] for item in output}) == len(output)
    for place, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == place]
        assert (
            own[0]["type"] == "response.output_item.added"
            and own[-1]["type"] == "response.output_item.done"
        )
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}
        text = "".join(event["delta"] for event in own if "delta" in event)
        if item["type"] == "function_call":
            assert text == item["arguments"]
            continue
        [part] = item["content"]
        assert text == part["text"]
        if item["type"] == "message":
            assert [at for event in own if "delta" in event for at in event["logprobs"]] == part[
                "logprobs"
            ]


@given(SAID, st.sampled_from(["stop", "length"]))
def test_whole_is_streamed(pieces: list[str], reason: Any) -> None:
    answer, deltas = answer_of(len(pieces)), deltas_of(pieces)
    streamed, whole = shape_of(answer), shape_of(answer)
    for delta in deltas:
        streamed.text(0, delta, answer)
    finished = Finished(reason, len(pieces))
    streamed.ending(0, finished, answer)
    text, usage = "".join(pieces), Usage(2, len(pieces), 0)
    body = whole.body([Choice(text, (), (), finished, usage, (1, 2), (), tuple(deltas))])
    assert nameless(body) == nameless(streamed.response())


def nameless(response: Json) -> Any:
    names = ("id", "call_id", "completed_at")
    return [
        {key: value for key, value in item.items() if key not in names}
        for item in response["output"]
    ], {key: response[key] for key in ("status", "usage", "incomplete_details")}


def test_a_token_belongs_to_what_it_says() -> None:
    """Of the markers none; of text that is held back all, once it comes."""
    text = "<think>hm</think>Hi"
    answer = answer_of(len(text))
    shape = shape_of(answer)
    for letter in text:
        shape.text(0, Delta(letter, (ord(letter),), (TokenLogprobs(ord(letter), -1.0),)), answer)
    shape.ending(0, Finished("stop", len(text)), answer)
    response = shape.response()
    [_, message] = response["output"]
    assert [at["token"] for at in message["content"][0]["logprobs"]] == ["H", "i"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 17}


@pytest.mark.parametrize("blank", ["\n\n", " "])
def test_blanks_alone_are_no_message(blank: str) -> None:
    """Unless they are all that was said."""
    for pieces, kinds in (([blank, CALL, blank], ["function_call"]), ([blank], ["message"])):
        answer = answer_of(2)
        shape = shape_of(answer)
        for delta in deltas_of(pieces):
            shape.text(0, delta, answer)
        events = events_of(shape.ending(0, Finished("stop", 2), answer))
        [item] = shape.response()["output"]
        assert [item["type"]] == kinds
        if kinds == ["message"]:
            assert item["content"][0]["text"] == blank
            assert [event["delta"] for event in events if "delta" in event] == [blank]


async def test_a_log_is_read_by_many_at_their_own_pace() -> None:
    log = EventLog()
    seen: dict[str, list[bytes]] = {"early": [], "late": []}

    async def read(name: str) -> None:
        while True:
            await log.wait_beyond(len(seen[name]))
            more = log.since(len(seen[name]), 2)
            if not more:
                return
            seen[name] += more

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(read, "early"))
            for place in range(5):
                log.add(b"%d" % place)
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(partial(read, "late"))
            log.close()
    assert seen["early"] == seen["late"] == [b"0", b"1", b"2", b"3", b"4"]
    assert log.size == 5
