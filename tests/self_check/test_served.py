"""Over HTTP and in the terminal: what was turned off, and why; and requests are answered rightly
all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from tests.families import reference
from tests.self_check.saving import save
from tests.web.scraping import scrape
from tests.web.serving import Served, ask, exchange, get, serving
from tests.zoo.building import build
from trouper import Settings, cli
from trouper.engine import probe
from trouper.engine.adaptations import adaptation_registry
from trouper.engine.host import MlxEngine

REASON = "rows of different lengths that decode together"
PROMPTS = ([5, 6, 7, 8, 9], [100, 3], [42])


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(adaptation_registry, "REGISTRY", [])
    monkeypatch.setattr(probe, "PRODUCT_SIZE", 64)
    monkeypatch.chdir(tmp_path)
    return str(save("gpt_bigcode", tmp_path / "gpt_bigcode"))


def engine(path: str, **settings: Any) -> Any:
    return MlxEngine(Settings(model=path, no_ssd=True, **settings))


async def tokens(served: Served, prompt: list[int], into: dict[int, list[int]]) -> None:
    body = {
        "prompt": prompt,
        "max_tokens": 6,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    status, answer = await ask(served, body)
    assert status == 200, answer
    into[len(prompt)] = answer["choices"][0]["token_ids"]


async def test_what_is_off_is_said_and_answers_are_right(faulty: str) -> None:
    async with serving(engine(faulty), {"model": faulty}) as served:
        got: dict[int, list[int]] = {}
        async with trio.open_nursery() as nursery:
            for prompt in PROMPTS:
                nursery.start_soon(tokens, served, prompt, got)
        model = build("gpt_bigcode")
        assert got == {len(prompt): reference(model, prompt, 6) for prompt in PROMPTS}
        check = json.loads((await exchange(served, get("/health")))[2])["self_check"]
        assert {*check["off"]} == {"batch", "prefill_together", "restore", "drafts", "banks"}
        assert REASON in check["off"]["batch"]
        assert (check["mode"], check["remembered"]) == ("fast", False)
        seen = await scrape(served)
        [enabled] = seen.values("trouper_feature_enabled", feature="batch")
        assert enabled == 0
        assert f'feature="batch",model_name="{faulty}",reason="{REASON}' in seen.text
        assert seen.value("trouper_self_check_seconds") == check["seconds"] > 0
        cache = json.loads((await exchange(served, get("/health")))[2])["cache"]
        assert "not kept beyond a row" in cache["reason"]
        await refused_drafts(served)
    level, said = doctor(faulty)
    assert (level, REASON in said) == ("warn", True)


async def refused_drafts(served: Served) -> None:
    status, answer = await ask(served, {"prompt": [1, 2], "max_tokens": 1, "speculation": "ngram"})
    assert (status, answer["error"]["code"]) == (400, "speculation_not_supported")


async def test_nothing_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = str(save("qwen3", tmp_path / "qwen3"))
    async with serving(engine(path), {"model": path}) as served:
        assert json.loads((await exchange(served, get("/health")))[2])["self_check"]["off"] == {}
        assert (await scrape(served)).values("trouper_feature_enabled") == [1, 1, 1, 1, 1]


def doctor(path: str, *flags: str) -> tuple[str, str]:
    outcome = CliRunner().invoke(
        cli.main, ["doctor", "--json", "--model", path, "--no-ssd", *flags]
    )
    [finding] = [one for one in json.loads(outcome.stdout) if one["subject"] == "self-check"]
    return finding["level"], finding["said"]


def test_the_doctor_before_any_start(faulty: str) -> None:
    level, said = doctor(faulty)
    assert (level, "the first start makes it" in said) == ("ok", True)
    level, said = doctor(faulty, "--self-check", "off")
    assert (level, "is guessed" in said) == ("warn", True)
