"""A draft model through HTTP: the same answers, counters by proposer, prefix hits; and requests
that choose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.families import save
from tests.sim.world import Eager
from tests.web.scraping import scrape
from tests.web.serving import Served, ask, exchange, get, serving
from trouper import Settings
from trouper.actors.scheduling import core
from trouper.engine.host import MlxEngine

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello there, my friend"}],
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
}
CHATS = "/v1/chat/completions"


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A model, and a copy of it that drafts. Rows draft whether it pays or not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(core, "Speculation", Eager)
    return {
        "model": str(save("llama", tmp_path / "llama")),
        "draft_model": str(save("llama", tmp_path / "copy")),
    }


async def speculation(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await exchange(served, get("/health")))[2])["speculation"]
    return found


async def content(served: Served, **asked: Any) -> str:
    status, answer = await ask(served, CHAT | asked, CHATS)
    assert status == 200, answer
    text: str = answer["choices"][0]["message"]["content"]
    return text


async def test_answers_are_the_same_and_each_proposer_is_counted(pair: dict[str, str]) -> None:
    async with serving(MlxEngine(Settings(no_ssd=True, **pair)), pair) as served:  # type: ignore[arg-type]
        plain = await content(served, speculation="off")
        assert (await speculation(served))["drafts"] == 0
        assert await content(served, speculation="draft_model") == plain
        counts = await speculation(served)
        assert counts["draft_model"] == pair["draft_model"]
        mine = counts["by_proposer"]["draft_model"]
        assert {*counts["by_proposer"]} == {"draft_model"}
        assert mine["accepted"] == mine["drafted"] == counts["drafted"] > 20, (
            "also from the first draft after a prefix hit on"
        )
        assert await content(served, speculation="ngram") == plain
        assert (await speculation(served))["by_proposer"]["draft_model"] == mine, (
            "it asked for n-grams"
        )
        assert await content(served) == plain
        counts, seen = await speculation(served), await scrape(served)
    for metric, field in (
        ("trouper_drafts", "drafts"),
        ("trouper_draft_tokens", "drafted"),
        ("trouper_draft_accepted_tokens", "accepted"),
    ):
        for name, stats in counts["by_proposer"].items():
            assert seen.values(f"{metric}_total", proposer=name) == [stats[field]]
    assert seen.value("vllm:spec_decode_num_draft_tokens_total") == counts["drafted"]


async def test_a_request_cannot_have_a_draft_model_that_is_not_there(pair: dict[str, str]) -> None:
    alone = {"model": pair["model"]}
    async with serving(MlxEngine(Settings(no_ssd=True, model=alone["model"])), alone) as served:  # type: ignore[arg-type]
        status, answer = await ask(served, CHAT | {"speculation": "draft_model"}, CHATS)
        assert (status, answer["error"]["code"]) == (400, "speculation_not_supported")
        assert "--draft-model" in answer["error"]["message"]
        assert await content(served, speculation="auto") == await content(served, speculation="off")
