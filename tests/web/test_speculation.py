"""`speculation` in a request, and what /health and /metrics say of drafts. The tokens are the same either way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes import FakeEngine
from tests.web.serving import ask, exchange, get, pace, serving

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
    return FakeEngine(before_step=pace, guess=lambda _, position: (4, 0 if position % 5 == 4 else 4))


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


async def test_health_and_metrics_count_drafts() -> None:
    async with serving(drafting()) as served:
        for _ in range(4):
            await ask(served, BODIES["/v1/completions"] | {"max_tokens": 200})
        health = json.loads((await exchange(served, get("/health")))[2])["speculation"]
        metrics = (await exchange(served, get("/metrics")))[2].decode()
    assert health["drafts"] > 0
    assert health["accepted"] == sum(health["accepted_at"]) <= health["drafted"]
    assert health["reason"] == "" and health["parked_s"] > 0
    for name, count in (("drafts", "drafts"), ("draft_tokens", "drafted"), ("accepted_tokens", "accepted")):
        [line] = [line for line in metrics.splitlines() if line.startswith(f"vllm:spec_decode_num_{name}_total")]
        assert float(line.split()[-1]) == health[count]
