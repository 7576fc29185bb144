"""A line for each request, with its id, and never a word of what was said. Read as the command
writes them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from tests.fakes import FakeEngine, Ranking, deadly
from tests.web.serving import (
    PATIENCE_S,
    STREAM,
    Served,
    ask,
    eventually,
    exchange,
    get,
    pace,
    post,
    serving,
)
from trouper.cli.log_setup import JsonLines, name_request
from trouper.protocol.kv import KvLayout
from trouper.protocol.setting_fields import ByteSize

ID = "X-Request-Id: mine-1\r\n"
SECRET = "my own secret"


class Log:
    """What was written."""

    def __init__(self, handler: logging.StreamHandler[io.StringIO]) -> None:
        self._handler = handler

    @property
    def text(self) -> str:
        return self._handler.stream.getvalue()

    def __getitem__(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == event]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def log() -> Iterator[Log]:
    logger, handler = logging.getLogger("trouper"), logging.StreamHandler(io.StringIO())
    handler.setFormatter(JsonLines())
    handler.addFilter(name_request)
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    yield Log(handler)
    logger.removeHandler(handler)
    logger.setLevel("NOTSET")


async def test_a_request_is_one_line(log: Log) -> None:
    async with serving() as served:
        body = {"prompt": SECRET, "max_tokens": 4, "ignore_eos": True}
        for _ in range(2):
            _, answer = await ask(served, body, headers=ID)
    first, line = log["request"]
    assert (first["cached_tokens"], line["cached_tokens"]) == (0, len(SECRET) - 1)
    assert (line["request_id"], line["level"], line["logger"]) == (
        "mine-1",
        "info",
        "trouper.requests",
    )
    assert (line["endpoint"], line["model"], line["reason"]) == (
        "/v1/completions",
        "fake",
        "length",
    )
    assert (line["prompt_tokens"], line["generated_tokens"]) == (len(SECRET), 4)
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["whole_s"]
    assert "code" not in line
    assert SECRET not in log.text
    assert answer["choices"][0]["text"] not in log.text
    assert not log["response"], "it has a line already"


async def test_how_long_a_request_was_preempted(log: Log) -> None:
    """There is memory for 80 tokens, and for one of the two answers at a time."""
    settings = {"kv_memory": ByteSize(8000), "speculation": "off"}
    kv = KvLayout(token_bytes=100, capacity_step=1, first_bank=0)
    async with serving(FakeEngine(before_step=pace, kv=kv), settings) as served:
        body = {"prompt": SECRET[:5], "max_tokens": 50, "ignore_eos": True}
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ask, served, body)
    (one, other) = log["request"]
    assert "preempted_s" not in one
    assert 0 < other["preempted_s"] < other["whole_s"]


async def test_chat_and_what_is_streamed(log: Log) -> None:
    async with serving() as served:
        chat = {
            "messages": [{"role": "user", "content": SECRET}],
            "max_tokens": 3,
            "stream": True,
            "n": 2,
        }
        await exchange(served, post("/v1/chat/completions", chat, ID))
    # Either may end first: the second is admitted in a step of its own where the loop is slow.
    assert {(line["request_id"], line["reason"]) for line in log["request"]} == {
        ("mine-1", "length"),
        ("mine-1-1", "length"),
    }
    assert len(log["request"]) == 2
    assert SECRET not in log.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [SECRET] * 40}),
        ("/rerank", {"query": SECRET, "documents": [SECRET] * 40}),
        ("/score", {"text_1": SECRET, "text_2": [SECRET] * 40}),
    ],
)
async def test_prompts_of_one_request_share_a_line(
    log: Log, path: str, body: dict[str, Any]
) -> None:
    async with serving(FakeEngine(tokenizer=Ranking())) as served:
        status, answer = await ask(served, body, path, ID)
        assert status == 200
        await eventually(lambda: bool(log["request"]))
    [line] = log["request"]
    assert line["request_id"] == "mine-1"
    assert line["endpoint"] == ("/v1" + path).replace("/v1/v1", "/v1")
    assert (line["prompts"], line["prompt_tokens"]) == (40, answer["usage"]["prompt_tokens"])
    assert line["whole_s"] > 0
    assert SECRET not in log.text


async def test_a_prompt_that_fails_has_a_line_of_its_own(log: Log) -> None:
    async with serving() as served:
        body = {"input": [SECRET] * 20 + ["x" * 5000]}
        assert (await ask(served, body, "/v1/embeddings", ID))[0] == 400
        await eventually(lambda: len(log["request"]) == 2)
    failed, shared = log["request"]
    assert (failed["request_id"], failed["reason"], failed["code"]) == (
        "mine-1-20",
        "refused",
        "context_length_exceeded",
    )
    assert (shared["request_id"], shared["reason"]) == ("mine-1", "abort")
    assert shared["prompts"] <= 20


async def test_who_left_is_a_line(log: Log) -> None:
    async with serving() as served:
        async with await served.connect() as stream:
            await stream.send_all(post("/v1/completions", STREAM, ID))
            with trio.fail_after(PATIENCE_S):
                while b"data: " not in await stream.receive_some():
                    pass
        await eventually(lambda: bool(log["request"]))
    [line] = log["request"]
    assert (line["request_id"], line["reason"]) == ("mine-1", "abort")


async def test_what_was_refused_says_why(log: Log) -> None:
    async with serving(api_key=("k",)) as served:
        key = ID + "Authorization: Bearer k\r\n"
        await ask(served, {"prompt": "x" * 5000}, headers=key)
        await ask(served, {"prompt": SECRET, "temperature": SECRET}, headers=key)
        await ask(served, {"prompt": SECRET}, headers=ID)
        await exchange(served, get(f"/v1/models/a%0Ab?{SECRET.replace(' ', '+')}", key))
        await exchange(served, get("/livez", ID))
    [line] = log["request"]
    assert (line["reason"], line["code"], line["level"]) == (
        "refused",
        "context_length_exceeded",
        "info",
    )
    assert [
        (one["status"], one["path"], one["level"], one["request_id"]) for one in log["response"]
    ] == [
        (400, "/v1/completions", "info", "mine-1"),
        (401, "/v1/completions", "info", "mine-1"),
        (404, "/v1/models/a\nb", "info", "mine-1"),
        (200, "/livez", "debug", "mine-1"),
    ]
    assert SECRET not in log.text
    assert "secret" not in log.text


async def test_an_engine_that_fails_is_a_warning(log: Log) -> None:
    async with serving(FakeEngine(dies=deadly)) as served:
        assert (await ask(served, {"prompt": SECRET}, headers=ID))[0] == 422
    [line] = log["request"]
    assert (line["level"], line["reason"], line["code"]) == (
        "warning",
        "error",
        "request_crashes_engine",
    )
    crashed = [line for line in log.lines if line["level"] == "error"]
    assert len(crashed) == 2, "with others, if there were any, and alone"
    assert all("EngineDied: in the middle of a step" in line["exception"] for line in crashed)
    assert SECRET not in log.text


async def test_a_bug_in_a_handler_is_under_the_id(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as served:
        await break_health(served, monkeypatch)
    [line] = [line for line in log.lines if line["level"] == "error"]
    assert line["request_id"] == "mine-1"
    assert "ZeroDivisionError" in line["exception"]


async def break_health(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(served.runtime), "health", lambda _: 1 // 0)
    assert (await exchange(served, get("/health", ID)))[0] == 500
    monkeypatch.undo()


async def test_what_runs_in_the_background_is_told_when_it_has_ended(log: Log) -> None:
    async with serving() as served:
        body = {"input": SECRET, "background": True, "ignore_eos": True, "max_output_tokens": 3000}
        _, made = await ask(served, body, "/v1/responses", ID)
        assert not log["request"], "its connection has ended, and it goes on"
        await exchange(served, post(f"/v1/responses/{made['id']}/cancel", {}))
        await eventually(lambda: bool(log["request"]))
    [line] = log["request"]
    assert (line["request_id"], line["endpoint"]) == ("mine-1", "/v1/responses")
    assert (line["reason"], line["code"]) == ("abort", "cancelled")


async def test_a_path_of_any_length_is_a_line_of_some(log: Log) -> None:
    """A stranger without a key could write 60 kB into the log with each request."""
    async with serving(api_key=("sk-a",)) as served:
        status, _, _ = await exchange(served, get("/" + "x" * 30_000))
        assert status == 401
    [line] = log["response"]
    assert line["path"].startswith("/xxx") and len(json.dumps(line)) < 1000
