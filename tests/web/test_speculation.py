"""`speculation` in a request, and what /health and /metrics say of drafts. The tokens are the same
either way."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.fakes import FakeEngine
from tests.web.responses import saying
from tests.web.serving import ask, exchange, get, pace, post, serving

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 60, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 60,
        "ignore_eos": True,
    },
    "/v1/responses": {"input": "hello", "max_output_tokens": 60, "ignore_eos": True},
}


def drafting() -> FakeEngine:
    """All drafts are right but for each fifth place's."""
    return FakeEngine(
        before_step=pace, guess=lambda _, position: (4, 0 if position % 5 == 4 else 4)
    )


def said(path: str, answer: Any) -> Any:
    return answer["output"][0]["content"] if path == "/v1/responses" else answer["choices"][0]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("default", ["ngram", "off"])
async def test_r9_a_request_says_whether_it_drafts(path: str, default: str) -> None:
    async with serving(drafting(), {"speculation": default}) as served:
        answers, drafts = [], []
        for how in ("off", "ngram", None):
            before = served.runtime.health().scheduler.speculation.drafts
            status, answer = await ask(served, BODIES[path] | {"speculation": how}, path)
            assert status == 200, answer
            answers.append(said(path, answer))
            drafts.append(served.runtime.health().scheduler.speculation.drafts - before)
        assert answers[0] == answers[1] == answers[2]
        assert drafts[0] == 0
        if default == "off":
            assert drafts[2] == 0
        assert any(admit.drafts for plan in served.engine.plans_seen for admit in plan.admit)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("wrong", ["eagle", 1, True, {}])
async def test_d13_another_way_is_refused(path: str, wrong: object) -> None:
    async with serving() as served:
        status, answer = await ask(served, BODIES[path] | {"speculation": wrong}, path)
        assert (status, answer["error"]["param"]) == (400, "speculation")


THOUGHT = (
    "<think>hm, let me see</think>Hello there, my friend: "
    'I call.<call>{"name": "f", "arguments": {}}</call>'
)
TOOLS: dict[str, Any] = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "f"}},
    "/v1/responses": {"type": "function", "name": "f"},
    "/v1/messages": {"name": "f", "input_schema": {"type": "object"}},
}
SCORED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"logprobs": True, "stream_options": {"include_usage": True}},
    "/v1/responses": {"include": ["message.output_text.logprobs"]},
    "/v1/messages": {"max_tokens": 200},
}


def counted(answer: Any) -> tuple[Any, list[str]]:
    """The details of what was generated, and the tokens of the text where they are listed by the
    kind of text."""
    usage, tokens = answer["usage"], []
    for item in answer.get("output", ()):
        for part in item.get("content", ()) if item["type"] == "message" else ():
            tokens += [at["token"] for at in part["logprobs"]]
    names = ("completion_tokens_details", "output_tokens_details")
    return next(usage[name] for name in names if name in usage), tokens


@pytest.mark.parametrize("path", TOOLS)
async def test_tokens_of_a_step_count_in_a_stream_as_in_a_complete_answer(path: str) -> None:
    """They are written together, and each still belongs to its own text: reasoning, content or a
    call."""
    asked = (
        {"input": "x"}
        if path == "/v1/responses"
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    body = asked | SCORED[path] | {"tools": [TOOLS[path]]}
    async with serving(
        saying(THOUGHT, guess=lambda *_: (4, 4)), {"speculation": "ngram"}
    ) as served:
        _, complete = await ask(
            served, {name: body[name] for name in body if name != "stream_options"}, path
        )
        _, _, data = await exchange(served, post(path, body | {"stream": True}))
    events = [json.loads(event) for event in re.findall(rb"data: (\{.*\})", data)]
    last = (
        events[-1]["response"]
        if path == "/v1/responses"
        else [event for event in events if event.get("usage")][-1]
    )
    assert counted(last) == counted(complete)
    if path == "/v1/responses":
        assert "".join(counted(complete)[1]) == "Hello there, my friend: I call."


async def test_health_and_metrics_count_drafts() -> None:
    async with serving(drafting()) as served:
        for _ in range(4):
            await ask(served, BODIES["/v1/completions"] | {"max_tokens": 200})
        health = json.loads((await exchange(served, get("/health")))[2])["speculation"]
        metrics = (await exchange(served, get("/metrics")))[2].decode()
    assert health["drafts"] > 0
    assert health["accepted"] == sum(health["accepted_at"]) <= health["drafted"]
    assert health["reason"] == "" and health["parked_s"] > 0
    for name, count in (
        ("drafts", "drafts"),
        ("draft_tokens", "drafted"),
        ("accepted_tokens", "accepted"),
    ):
        [line] = [
            line
            for line in metrics.splitlines()
            if line.startswith(f"vllm:spec_decode_num_{name}_total")
        ]
        assert float(line.split()[-1]) == health[count]
