"""Calls that a model did not write as its format has them: what clients get, and where it is
counted."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.output.samples import FormatTokenizer
from tests.web.responses import saying
from tests.web.scraping import scrape
from tests.web.serving import exchange, post, serving
from trouper.protocol.logs import CURRENT_REQUEST

Json = dict[str, Any]
SAID: list[Json] = [{"role": "user", "content": "x"}]
SCHEMA: Json = {"type": "object", "properties": {"path": {"type": "string"}}}
REQUESTS: dict[str, Json] = {
    "/v1/chat/completions": {
        "messages": SAID,
        "tools": [{"type": "function", "function": {"name": "edit", "parameters": SCHEMA}}],
    },
    "/v1/responses": {
        "input": "x",
        "tools": [{"type": "function", "name": "edit", "parameters": SCHEMA}],
    },
    "/v1/messages": {
        "messages": SAID,
        "max_tokens": 200,
        "tools": [{"name": "edit", "input_schema": SCHEMA}],
    },
}
WRITTEN = {
    "right": ('<tool_call>{"name": "edit", "arguments": {"path": "x.py"}}</tool_call>', True),
    "repaired": ('<tool_call>{"name": "edit", "arguments": {"path": "x.py"}</tool_call>', True),
    "no_call": ('<tool_call>{"name": "delete", "arguments": {"path": "x.py"}}</tool_call>', False),
}
METRIC = "trouper_malformed_calls_total"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("outcome", WRITTEN)
@pytest.mark.long(but=("right-*-True", "no_call-*-False", "repaired-/v1/chat/completions-*"))
async def test_outcomes_are_counted(
    path: str, stream: bool, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    text, called = WRITTEN[outcome]
    with caplog.at_level(logging.INFO, logger="trouper.web"):
        async with serving(saying(text, tokenizer=FormatTokenizer.of("hermes"))) as served:
            for _ in range(2):
                status, _, data = await exchange(
                    served, post(path, REQUESTS[path] | {"stream": stream})
                )
                assert status == 200
                assert (b"tool_call>" not in data and b"edit" in data) == called
            counted = [
                (dict(labels)["outcome"], value)
                for (name, labels), value in (await scrape(served)).samples.items()
                if name == METRIC
            ]
    assert counted == ([] if outcome == "right" else [(outcome, 2)])
    lines = [record.getMessage() for record in caplog.records if METRIC in record.getMessage()]
    assert len(lines) == (outcome != "right"), "one line for the first of each kind"


class Named(logging.Handler):
    """Keeps the request that was current when a line was written, as the program's own handler
    does."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if METRIC in record.getMessage():
            self.requests.append(CURRENT_REQUEST.get())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("outcome", ["repaired", "no_call"])
async def test_the_line_has_the_id_of_its_request(
    path: str, stream: bool, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the text of its stream was written by another task."""
    named, web = Named(), logging.getLogger("trouper.web")
    web.addHandler(named)
    try:
        with caplog.at_level(logging.INFO, logger="trouper.web"):
            async with serving(
                saying(WRITTEN[outcome][0], tokenizer=FormatTokenizer.of("hermes"))
            ) as served:
                request = post(path, REQUESTS[path] | {"stream": stream}, "X-Request-Id: mine\r\n")
                assert (await exchange(served, request))[0] == 200
    finally:
        web.removeHandler(named)
    assert named.requests == ["mine"]
