"""An MTP head through HTTP: the same answers, counters, prefix hits; requests that choose, and
settings that leave it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drafts.test_served import CHAT, CHATS, content, speculation
from tests.families import save
from tests.heads import save_with_head
from tests.sim.world import Eager
from tests.web.scraping import scrape
from tests.web.serving import ask, serving
from trouper import Settings
from trouper.actors.scheduling import core
from trouper.engine.host import MlxEngine


@pytest.fixture(autouse=True)
def eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows draft whether it pays or not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(core, "Speculation", Eager)


def engine(path: Path, **settings: Any) -> Any:
    return MlxEngine(Settings(model=str(path), no_ssd=True, **settings))


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3"])
@pytest.mark.long(but=("deepseek_v3",))
async def test_a_head_takes_part_and_is_counted(name: str, tmp_path: Path) -> None:
    path = save_with_head(name, tmp_path / name, "of states")
    async with serving(engine(path), {"model": str(path)}) as served:
        plain = await content(served, speculation="off")
        assert (await speculation(served))["mtp"] == {"loaded": True, "reason": ""}
        assert await content(served, speculation="mtp") == plain
        counts = await speculation(served)
        mine = counts["by_proposer"]["mtp"]
        assert {*counts["by_proposer"]} == {"mtp"}
        assert mine["accepted"] == mine["drafted"] == counts["drafted"] > 20, (
            "also from the first draft after a hit on"
        )
        assert await content(served, speculation="ngram") == plain
        assert (await speculation(served))["by_proposer"]["mtp"] == mine, "it asked for n-grams"
        assert await content(served) == plain
        counts, seen = await speculation(served), await scrape(served)
    assert counts["by_proposer"]["mtp"]["drafts"] > mine["drafts"], "without being asked for"
    for metric, field in (
        ("drafts", "drafts"),
        ("draft_tokens", "drafted"),
        ("draft_accepted_tokens", "accepted"),
    ):
        assert seen.values(f"trouper_{metric}_total", proposer="mtp") == [
            counts["by_proposer"]["mtp"][field]
        ]


async def test_prompts_that_are_embedded_are_in_no_heads_way(tmp_path: Path) -> None:
    path = save_with_head("deepseek_v3", tmp_path / "model", "of states")
    prompt = "hello there, my friend; " * 4
    async with serving(engine(path), {"model": str(path)}) as served:
        status, answer = await ask(served, {"input": prompt}, "/v1/embeddings")
        assert status == 200, answer
        asked = {
            "prompt": prompt + "and you",
            "max_tokens": 20,
            "temperature": 0,
            "ignore_eos": True,
        }
        answers = [
            await ask(served, asked | {"speculation": how}, "/v1/completions")
            for how in ("mtp", "off")
        ]
        mtp, off = (answer["choices"][0]["text"] for _, answer in answers)
        assert mtp == off
        mine = (await speculation(served))["by_proposer"]["mtp"]
        assert mine["accepted"] == mine["drafted"] > 10


@pytest.mark.parametrize("how", ["off", "ngram"])
async def test_settings_may_leave_the_head_out(how: str, tmp_path: Path) -> None:
    path = save_with_head("deepseek_v3", tmp_path / "with")
    async with serving(engine(path, speculation=how), {"model": str(path)}) as served:
        assert (await speculation(served))["mtp"] == {
            "loaded": False,
            "reason": f"--speculation {how}",
        }
        status, answer = await ask(served, CHAT | {"speculation": "mtp"}, CHATS)
        assert (status, answer["error"]["code"]) == (400, "speculation_not_supported")
        assert f"(--speculation {how})" in answer["error"]["message"]
        assert await content(served, speculation="auto")


async def test_a_request_cannot_have_a_head_that_is_not_there(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "llama")
    async with serving(engine(path), {"model": str(path)}) as served:
        assert (await speculation(served))["mtp"] == {
            "loaded": False,
            "reason": "its checkpoint has none",
        }
        status, answer = await ask(served, CHAT | {"speculation": "mtp"}, CHATS)
        assert (status, answer["error"]["code"]) == (400, "speculation_not_supported")
        assert "no MTP head (its checkpoint has none)" in answer["error"]["message"]
