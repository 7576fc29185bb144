"""A stream whose formatting raises an error that nothing foresaw: the client is told, in its
dialect, and the others go on."""

from __future__ import annotations

import errno
import json
import logging
from typing import Any

import pytest

from tests.fakes import FakeEngine
from tests.web.serving import PATIENCE_S, eventually, exchange, pace, post, serving
from trouper.web.openai.completion_dialect import CompletionDialect
from trouper.web.output.output_parser import OutputParser
from trouper.web.streaming import response_streams

SAID = [{"role": "user", "content": "x"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 9, "n": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 9},
    "/v1/responses": {"input": "x", "max_output_tokens": 9},
    "/v1/messages": {"messages": SAID, "max_tokens": 9},
}
FIRST = 3
"""Calls before the one that fails."""


def failing(method: Any, first: int = FIRST) -> Any:
    calls: list[None] = []

    def fails(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) > first:
            raise ValueError("Exceeds the limit for integer string conversion")
        return method(*arguments)

    return fails


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_it_ends_with_an_error_event(
    path: str, version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Written directly (HTTP/1.1, one answer), and through all layers."""
    caplog.set_level(logging.ERROR, "trouper.web")
    monkeypatch.setattr(OutputParser, "push", failing(OutputParser.push))
    monkeypatch.setattr(CompletionDialect, "text", failing(CompletionDialect.text))
    async with serving(FakeEngine(before_step=pace)) as served:
        request = post(path, STREAMS[path] | {"stream": True, "ignore_eos": True})
        status, headers, body = await exchange(
            served, request.replace(b"HTTP/1.1", b"HTTP/" + version.encode())
        )
        assert status == 200
        events = [
            json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: ")
        ]
        last = events[-1]
        if path == "/v1/responses":
            assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
            [last] = [event for event in events if event["type"] == "error"]
        error = last.get("error", last)
        assert error["message"].startswith("an internal error")
        assert body.endswith(b"0\r\n\r\n") is ("transfer-encoding" in headers), (
            "the body is complete"
        )
        await eventually(lambda: not served.busy)
        assert "a stream failed" in caplog.text
        monkeypatch.undo()
        assert (await exchange(served, post(path, STREAMS[path])))[0] == 200


async def test_first_events_are_there_if_the_first_text_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are one write otherwise."""
    monkeypatch.setattr(OutputParser, "push", failing(OutputParser.push, 0))
    monkeypatch.setattr(response_streams, "HEAD_WAIT_S", PATIENCE_S)
    async with serving(FakeEngine(before_step=pace)) as served:
        body = {"input": "x", "max_output_tokens": 9, "stream": True, "ignore_eos": True}
        status, _, received = await exchange(served, post("/v1/responses", body))
        assert status == 200
        types = [
            json.loads(line[6:])["type"]
            for line in received.decode().split("\n")
            if line.startswith("data: ")
        ]
        assert (types[0], types[-1]) == ("response.created", "response.failed")


async def test_a_stream_that_lacks_a_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lacks(*_: object) -> bytes:
        raise OSError(errno.EAGAIN, "the system starts no further thread")

    monkeypatch.setattr(response_streams.EventStream, "_next_write", lacks)
    async with serving(FakeEngine(before_step=pace)) as served:
        body = STREAMS["/v1/completions"] | {"stream": True}
        status, _, received = await exchange(served, post("/v1/completions", body))
    assert status == 200
    assert b'"code":"system_shortage"' in received
