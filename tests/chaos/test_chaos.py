"""A few seeds, and that a broken promise is seen."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from tests.chaos import playing
from tests.chaos.__main__ import campaign
from tests.chaos.faults import KINDS, Fault, drawn
from tests.chaos.house import FIRST, House, described, models
from tests.chaos.playing import judged, unsettled
from tests.soak.client import CHAT, Ask, Heard
from tests.soak.wishes import Question, questions

STREAMED = Question("first", Ask(CHAT, {"stream": True}), [["abcd", "stop"]])
WHOLE = Question("first", Ask(CHAT, {}), [["abcd", "stop"]])
KILLED, SLOW = [Fault("killed", 0, 0)], [Fault("disk slow", 0, 0, 0.1)]
UNREAD = [Fault("decoder killed", 0, 0.5)]


@pytest.mark.long
def test_two_seeds_on_a_real_server_break_no_promise() -> None:
    with campaign(count=1, ranks=False) as played:
        for seed in (6, 9):
            played.seed(seed, ranks=False)
    assert played.broken == {}
    assert played.outcomes["right"] > 5


def test_a_server_that_is_killed_amid_a_load_breaks_no_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers before the kill are the right ones; the next process has its disk."""
    monkeypatch.setattr(playing, "drawn", lambda _: [Fault("killed", 0.3, 0)])
    (disk := tmp_path / "disk").mkdir()
    house = House(tmp_path, disk, models(tmp_path / "models"), (FIRST,))
    try:
        house.start()
        house.until_ready()
        answers = trio.run(questions, house.port, described(FIRST), 1, Random(7))
        _, seen = trio.run(playing.play, house, answers, 6)
        seen.broken += playing.drained(house)
    finally:
        house.kill()
    assert seen.broken == []
    assert seen.outcomes["right"] > 5


def test_every_kind_of_fault_is_drawn_alone_and_with_others() -> None:
    drawn_faults = [drawn(Random(seed)) for seed in range(100)]
    assert {fault.kind for faults in drawn_faults for fault in faults} == set(KINDS)
    assert {len(faults) for faults in drawn_faults} == {1, 2, 3}
    assert drawn(Random(5)) == drawn(Random(5))


def streamed(*texts: str, end: bool) -> Heard:
    events: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
        for text in texts
    ]
    if end:
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return Heard(200, body + (b"data: [DONE]\n\n" if end else b""))


def test_settled_is_a_server_where_no_model_is_on_its_way() -> None:
    idle = {"state": "ready", "cache_stats": {"active_sequences": 0, "queued_requests": 0}}
    busy = {"state": "ready", "cache_stats": {"active_sequences": 1, "queued_requests": 0}}
    none: dict[str, Any] = {"status": "ok", "detail": "no model is loaded"}
    assert not unsettled(idle) and unsettled(busy)
    assert not unsettled(
        none | {"models": {"a": {"state": "unloaded"}, "b": {"state": "unloaded"}}}
    )
    assert unsettled(none | {"models": {"a": {"state": "unloaded"}, "b": {"state": "loading"}}})
    assert not unsettled(idle | {"models": {"a": idle, "b": {"state": "unloaded"}}})
    assert unsettled(idle | {"models": {"a": idle, "b": busy}})


class TestJudged:
    def test_right_and_wrong_streams(self) -> None:
        assert judged(STREAMED, streamed("ab", "cd", end=True), ()) == ("right", "")
        assert "wrong" in judged(STREAMED, streamed("ab", "ce", end=True), KILLED)[1]
        assert "wrong" in judged(STREAMED, streamed("ab", end=True), KILLED)[1], (
            "a part as if it were the whole"
        )

    def test_a_cut_stream_is_forgiven_where_something_was_killed_and_its_text_was_right(
        self,
    ) -> None:
        assert judged(STREAMED, streamed("ab", end=False), KILLED) == ("cut", "")
        assert "nothing was killed" in judged(STREAMED, streamed("ab", end=False), SLOW)[1]
        assert "no part" in judged(STREAMED, streamed("ax", end=False), KILLED)[1]
        assert "nothing was killed" in judged(WHOLE, Heard(0), SLOW)[1]
        assert judged(WHOLE, Heard(200, b'{"choices": ['), KILLED) == ("cut", ""), (
            "in the middle of its only object"
        )

    def test_an_error_whose_body_was_cut_is_forgiven_where_something_was_killed(self) -> None:
        assert judged(WHOLE, Heard(400, b"", short=True), KILLED) == ("cut", ""), (
            "between the head and the body"
        )
        assert "nothing was killed" in judged(WHOLE, Heard(400, b'{"err', short=True), SLOW)[1]
        assert "without a message" in judged(WHOLE, Heard(400, b""), KILLED)[1]

    def test_errors(self) -> None:
        error = Heard(503, b'{"error": {"message": "it leaves", "code": "draining"}}')
        assert judged(WHOLE, error, KILLED) == ("error draining", "")
        assert "nothing explains" in judged(WHOLE, error, SLOW)[1]
        unread = Heard(503, b'{"error": {"message": "x", "code": "image_decoder_unavailable"}}')
        assert judged(WHOLE, unread, UNREAD) == ("error image_decoder_unavailable", "")
        assert "nothing explains" in judged(WHOLE, error, UNREAD)[1], "it costs images alone"
        assert "without a message" in judged(WHOLE, Heard(500, b"oops"), KILLED)[1]
