"""Errors are an interface: clients know by code, status and text what to do after a refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest

from tests.actors.bench import generate
from tests.fakes import ByteTokenizer
from tests.web.serving import ask, exchange, get, post, serving
from tests.web.test_long_prompts import LongEngine
from trouper.actors.request_intake import room
from trouper.actors.runtime.prompt_tokenizing import check_length
from trouper.actors.scheduling.kv_memory import too_long
from trouper.protocol.api_keys import Keys
from trouper.protocol.problems import (
    DRAINING,
    SYSTEM_SHORTAGE,
    Problem,
    RequestFailed,
    grammars_full,
    queue_full,
)
from trouper.protocol.requests import ChatPrompt
from trouper.protocol.settings import ServerSettings, Settings
from trouper.web.anthropic.errors import anthropic_error, anthropic_status
from trouper.web.http.body_parsing import too_large
from trouper.web.http.json_response import error_body

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
LONG = "x" * 5000
CHATTED: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5}

# What clients search for, read in their sources in November 2026; any of its phrases is enough for
# a client. Codex, Cline and opencode look at the code, too.
OF_MESSAGE: Mapping[str, tuple[str, ...]] = {
    "pi, openclaw": (
        r"maximum context length is \d+ tokens",
        r"exceeds the context window",
        r"context[_ ]length[_ ]exceeded",
    ),
    "opencode": (r"exceeds the context window", r"maximum context length is \d+ tokens"),
    "LiteLLM": (r"this model's maximum context length is", r"exceeds the available context size"),
    "Cline": (r"context\s*(length|window)", r"maximum context"),
    "LangChain.js": (r"Input tokens exceed the configured limit", r"exceeds the context window"),
    "LangChain": (r"context_length_exceeded", r"prompt is too long"),
    "LangChain, in a stream": (r"exceeds the context window",),
    "CrewAI": (r"maximum context length", r"context length exceeded"),
    "OpenHands": (r"please reduce the length of", r"prompt is too long"),
    "Mistral Vibe": (r"maximum context length", r"prompt is too long"),
    "goose": (r"too long", r"context length", r"reduce the length"),
}
OF_ANTHROPIC: Mapping[str, str] = {
    "Claude Code": r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
    "openclaw": r"prompt is too long:\s*[\d,]+\s+tokens\s*>\s*[\d,]+\s+maximum",
    "pi, opencode, LiteLLM, LangChain": r"prompt is too long",
}
OF_LENGTH = r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)"
"""Claude Code sends the request again with what is left."""


def refused(work: Callable[[], object]) -> Problem:
    with pytest.raises(RequestFailed) as failed:
        work()
    return failed.value.problem


class Long(ByteTokenizer):
    """Has a long token that the text has not, so that only tokenizing tells."""

    longest_token = 20


SPOKEN = generate(prompt=ChatPrompt(({"role": "user", "content": "x"},)))
FULL: Mapping[str, Problem] = {
    "context": refused(lambda: room(SPOKEN, 100, 100, Settings())),
    "far beyond": refused(lambda: room(SPOKEN, 1000, 100, Settings())),
    "flag": refused(lambda: room(SPOKEN, 60, 100, Settings(max_prompt_tokens=50))),
    "memory": too_long(SPOKEN, 60, 50),
    "characters": refused(lambda: check_length("x" * 10**4, ByteTokenizer(), 50, "messages")),
    "beginning": refused(lambda: check_length("x" * 60_000, Long(), 2000, "messages")),
}


@pytest.mark.parametrize("cause", FULL)
def test_each_client_sees_that_the_context_is_full(cause: str) -> None:
    problem = FULL[cause]
    error = error_body(problem)["error"]
    assert (problem.status, error["code"]) == (400, "context_length_exceeded")
    for client, phrases in OF_MESSAGE.items():
        assert any(re.search(each, problem.message, re.IGNORECASE) for each in phrases), client
    body = anthropic_error(problem, "id")["error"]
    assert (body["type"], anthropic_status(problem)) == ("invalid_request_error", 400)
    for client, phrase in OF_ANTHROPIC.items():
        assert re.search(phrase, body["message"], re.IGNORECASE), client
    match = re.search(OF_ANTHROPIC["Claude Code"], body["message"])
    assert match and int(match[1]) > int(match[2]), "it drops so many tokens"


def test_the_answer_alone_may_be_too_long() -> None:
    requested = attrs.evolve(SPOKEN, max_tokens=90)
    problem = refused(lambda: room(requested, 60, 100, Settings()))
    assert problem.param == "max_tokens"
    assert "maximum context length is 100 tokens" in problem.message
    assert "requested 150 tokens (60 in the " in problem.message
    match = re.search(OF_LENGTH, anthropic_error(problem, "")["error"]["message"])
    assert match and match.groups() == ("60", "90", "100")


KEYS = Keys.of(ServerSettings(api_key=("right",)))
OTHERS: Mapping[str, Problem] = {
    "queue": queue_full(9),
    "grammars": grammars_full(2, 4),
    "size": too_large(1000),
    "shortage": SYSTEM_SHORTAGE,
    "draining": DRAINING,
    "wrong key": KEYS.problem("Bearer wrong", None) or DRAINING,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_no_other_refusal_looks_like_a_full_context(kind: str) -> None:
    """A session that is compacted because the queue was full has lost its history for nothing."""
    problem = OTHERS[kind]
    assert problem.code != "context_length_exceeded"
    texts = (problem.message, anthropic_error(problem, "")["error"]["message"])
    phrases = [each for those in OF_MESSAGE.values() for each in those]
    for phrase in (*phrases, *OF_ANTHROPIC.values(), r"too many tokens", r"exceeds the limit of"):
        assert not any(re.search(phrase, text, re.IGNORECASE) for text in texts), phrase


def test_a_rate_limit_has_its_its_text_too() -> None:
    for kind in ("queue", "grammars"):
        assert OTHERS[kind].type == "rate_limit_error"
        assert "too many requests" in OTHERS[kind].message and OTHERS[kind].retry_after_s


@pytest.mark.parametrize(
    ("problem", "status", "kind", "text"),
    [
        (SYSTEM_SHORTAGE, 529, "overloaded_error", "short of"),
        (DRAINING, 503, "overloaded_error", "shutting down"),
        (queue_full(9), 429, "rate_limit_error", "too many requests"),
        (too_large(9), 413, "request_too_large", "Request exceeds the maximum"),
        (OTHERS["wrong key"], 401, "authentication_error", "invalid x-api-key"),
        (Problem(404, "no", code="model_not_found"), 404, "not_found_error", "no"),
        (Problem(504, "late", code="token_timeout"), 504, "timeout_error", "late"),
    ],
)
def test_anthropics_statuses_and_words(problem: Problem, status: int, kind: str, text: str) -> None:
    body = anthropic_error(problem, "")["error"]
    assert (anthropic_status(problem), body["type"]) == (status, kind)
    assert text in body["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, CHATTED, "messages"),
        (CHAT, CHATTED | {"stream": True}, "messages"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": list(range(1, 250))}, "prompt"),
        (RESPONSES, {"input": LONG}, "input"),
        (MESSAGES, CHATTED, None),
        (MESSAGES, CHATTED | {"stream": True}, None),
        ("/v1/embeddings", {"input": ["a", LONG]}, "input"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
    ],
)
async def test_every_endpoint_says_it_so(
    full: ServedSmall, path: str, body: dict[str, Any], param: str | None
) -> None:
    status, answer = await full(path, body)
    error = answer["error"]
    assert status == 400
    if path.startswith(MESSAGES):
        assert re.search(OF_ANTHROPIC["openclaw"], error["message"])
    else:
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert re.search(r"maximum context length is \d+ tokens", error["message"])


ServedSmall = Callable[[str, dict[str, Any]], Any]


@pytest.fixture
async def full() -> Any:
    async with serving(LongEngine(context_length=200)) as served:

        async def requested(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            return await ask(served, body, path)

        yield requested


async def test_what_is_missing() -> None:
    """OpenAI's statuses: 404 for a model, 400 for the response to go on from."""
    async with serving(model_alias=("off",)) as served:
        for path in (CHAT, MESSAGES):
            short = CHATTED | {"messages": [{"role": "user", "content": "x"}], "model": "other"}
            status, answer = await ask(served, short, path)
            assert status == 404 and "'other' does not exist" in answer["error"]["message"]
        missing = {"input": "x", "previous_response_id": "resp_1"}
        status, answer = await ask(served, missing, RESPONSES)
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (
            400,
            "previous_response_not_found",
            "previous_response_id",
        )
        assert error["message"].startswith("Previous response with id 'resp_1' not found")
        status, _, body = await exchange(served, get("/v1/responses/resp_1"))
        assert (status, json.loads(body)["error"]["code"]) == (404, "response_not_found")


async def test_a_wrong_key_in_each_dialects_words() -> None:
    async with serving(api_key=("right",)) as served:
        for path, text in ((CHAT, "Incorrect API key provided"), (MESSAGES, "invalid x-api-key")):
            raw = post(path, CHATTED, "Authorization: Bearer wrong\r\nConnection: close\r\n")
            status, _, body = await exchange(served, raw)
            assert status == 401 and text in json.loads(body)["error"]["message"]


async def test_a_stream_of_a_response_tells_it_by_events() -> None:
    """Codex makes a conversation shorter after `response.failed`, not after a 400."""
    async with serving(LongEngine(context_length=200)) as served:
        raw = post(RESPONSES, {"input": LONG, "stream": True}, "Connection: close\r\n")
        status, headers, data = await exchange(served, raw)
        assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        events = [
            json.loads(line.removeprefix("data: "))
            for line in data.decode().splitlines()
            if line.startswith("data: ")
        ]
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "error",
            "response.failed",
        ]
        assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
        failed = events[-1]["response"]
        for error in (events[2], events[2]["error"], failed["error"]):
            assert error["code"] == "context_length_exceeded"
            assert "exceeds the context window" in error["message"]
        status, _, _ = await exchange(served, get(f"/v1/responses/{failed['id']}"))
        assert status == 404, "nothing is stored"
