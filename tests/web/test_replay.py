"""Traces: what their lines mean, and a replay against a real server with a fake engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from benchmarks.replay import Played, body_of, parsed, replay, summary
from benchmarks.traces import format as traces
from benchmarks.traces.format import Request, Scale, read, tokens_of, turns
from tests.web.serving import serving

MOONCAKE = (
    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, *range(1, 14)]},
    {"timestamp": 0, "input_length": 7322, "output_length": 490, "hash_ids": [0, *range(14, 28)]},
    {
        "timestamp": 3052,
        "input_length": 2290,
        "output_length": 316,
        "hash_ids": [0, 42, 43, 44, 45],
    },
    {"timestamp": 3052, "input_length": 6758, "output_length": 3, "hash_ids": [0, *range(1, 14)]},
)
"""Of kvcache-ai/Mooncake, FAST25-release/traces/toolagent_trace.jsonl; the last line repeats the
first."""


def written(place: Path, *rows: dict[str, Any]) -> Path:
    file = place / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_mooncake_trace(tmp_path: Path) -> None:
    requests = read(written(tmp_path, *MOONCAKE), Scale())
    assert [len(request.prompt) for request in requests] == [6758, 7322, 2290, 6758]
    assert [request.max_tokens for request in requests] == [500, 490, 316, 3]
    assert [request.at_s for request in requests] == [0, 0, 3.052, 3.052]
    assert [request.known_tokens for request in requests] == [0, 512, 512, 6758]
    first, second, third, again = (list(request.prompt) for request in requests)
    assert first[:512] == second[:512] == third[:512] and first[512] != second[512]
    assert first == again == list(read(written(tmp_path, *MOONCAKE), Scale(), 1)[0].prompt)


def test_a_trace_for_a_smaller_machine(tmp_path: Path) -> None:
    requests = read(written(tmp_path, *MOONCAKE), Scale(lengths=1 / 64, time=2, tokens=(5, 9)))
    assert [len(request.prompt) for request in requests] == [106, 114, 36, 106]
    assert [request.known_tokens for request in requests] == [0, 8, 8, 106]
    assert requests[2].at_s == 1.526
    assert set(requests[0].prompt) <= {5, 6, 7, 8}


def test_texts_sessions_and_other_names(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi"}]
    rows = (
        {"prompt": "Once"},
        {"messages": talk, "session_id": 7, "created_time": 2000, "max_tokens": 5},
        {"text_input": "Late", "timestamp": 500, "output_tokens": 9},
        {"messages": [*talk, *talk], "session_id": 7, "delay_ms": 250},
        {"input_tokens": 100},
        {"input_tokens": 100},
    )
    requests = read(written(tmp_path, *rows), Scale())
    assert [request.max_tokens for request in requests] == [64, 5, 9, 64, 64, 64]
    assert [request.session for request in requests] == [None, "7", None, "7", None, None]
    assert (requests[1].at_s, requests[3].delay_s) == (2, 0.25)
    assert requests[4].prompt != requests[5].prompt and requests[5].known_tokens == 0, (
        "nothing says that they share any"
    )
    assert [len(session) for session in turns(requests)] == [1, 1, 1, 1, 2]
    assert (
        body_of(requests[1], "m")[0] == "/v1/chat/completions"
        and body_of(requests[0], None)[0] == "/v1/completions"
    )


@pytest.mark.parametrize("row", ['{"timestamp": 1}', "not json", '{"input_length": "many"}', "[]"])
def test_a_line_that_is_none_is_named(tmp_path: Path, row: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"prompt": "Once"}\n' + row + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read(file, Scale())


def test_blocks_are_equal_wherever_they_are() -> None:
    assert tokens_of([3, 4], 20, 8, (1, 99))[:16] == tokens_of([3, 4], 16, 8, (1, 99))
    assert len(tokens_of([3], 20, 8, (1, 99))) == 20, "lengths may exceed the blocks that are named"


async def test_a_replay() -> None:
    """Turns wait for one another, what was seen is found again, and what is refused is counted."""
    conversation = list(range(30, 80))
    requests = [
        Request(conversation[:40], 4, session="a", known_tokens=0),
        Request(conversation, 4, at_s=0.01, session="a", known_tokens=40),
        Request("hello", 3, at_s=0.05),
        Request([10**7], 5, at_s=0.02, session="b"),
    ]
    async with serving(settings={"block_size": 8}) as served:
        with trio.fail_after(60):
            played = await replay(f"http://127.0.0.1:{served.port}", requests)
        assert served.runtime.health().scheduler.requests_completed == 3
    found = summary(played, 2.0)
    assert (found["requests"], found["output tokens"], found["output tokens a second"]) == (
        4,
        11,
        5.5,
    )
    assert list(found["errors"].values()) == [1]
    second = next(one for one in played if one.turn)
    assert second.cached_tokens >= 32
    assert 0 < found["hit rate"] <= found["hit rate, at most"] < 1
    assert all(value > 0 for value in found["first token of later turns, s"])


def test_flags_of_the_server_stand_behind_two_dashes() -> None:
    options = parsed(["trace.jsonl", "--lengths", "0.5", "--", "--self-check", "off"])
    assert (options.file, options.lengths, options.flags) == (
        Path("trace.jsonl"),
        0.5,
        ("--self-check", "off"),
    )
    assert parsed(["--requests", "3", "trace.jsonl"]).flags == ()


def test_a_summary_of_nothing_and_of_errors_alone() -> None:
    assert summary([], 1.0)["first token, s"] == [None] * 3
    found = summary([Played(0, error="queue_full"), Played(0, error="queue_full")], 1.0)
    assert (found["errors"], found["hit rate"]) == ({"queue_full": 2}, None)


def test_percentiles_are_of_answers_alone() -> None:
    played = [
        Played(0, first_s=float(n), prompt_tokens=10, cached_tokens=5, known_tokens=8)
        for n in range(1, 101)
    ]
    found = summary([*played, Played(0, first_s=1000.0, error="cut")], 10.0)
    assert found["first token, s"] == [51.0, 91.0, 100.0]
    assert (found["hit rate"], found["hit rate, at most"]) == (0.5, 0.8)


def test_the_recorded_session_of_the_repository() -> None:
    requests = read(Path(traces.__file__).with_name("agents.jsonl"), Scale())
    sessions = list(turns(requests))
    assert len(sessions) > 5 and max(map(len, sessions)) > 3
    assert all(
        isinstance(request.prompt, list) and request.max_tokens < 100 for request in requests
    )
