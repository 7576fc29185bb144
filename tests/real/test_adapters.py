"""LoRA adapters over HTTP with a tiny real model: chosen by name, listed, and no cached prefix is
shared between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import trio

from tests.adapters import flags, save_adapter
from tests.families import build, save
from tests.real.serving import running
from trouper import Runtime, ServerSettings
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.settings import Settings
from trouper.web.server import serve_http

NAMES = ("one", "two")
PROMPT = 2 * "a prompt that is long enough for some blocks of sixteen tokens, whatever answers it; "
"""Some more than what is worth restoring on a GPU."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    save("llama", directory / "base")
    for number, name in enumerate(NAMES):
        save_adapter(build("llama"), directory / name, number)
    return directory


@asynccontextmanager
async def serving(files: Path, **settings: Any) -> AsyncIterator[tuple[Runtime, str]]:
    given = {"adapter": flags([files / name for name in NAMES]), "self_check": "off"} | settings
    shutdown = trio.Event()
    async with running(str(files / "base"), **given) as runtime, trio.open_nursery() as nursery:
        server = ServerSettings(
            port=0, served_model_name=("base",), adapters_from=(str(files.parent),)
        )
        [url] = await nursery.start(partial(serve_http, runtime, server, shutdown=shutdown))
        yield runtime, url
        shutdown.set()


async def complete(url: str, model: str, **more: Any) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    } | more
    async with httpx2.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
    found: dict[str, Any] = answer.json()
    return {"status": answer.status_code} | found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_each_name_has_its_own_answer_and_its_own_cache(files: Path) -> None:
    async with serving(files) as (runtime, url):
        first = {name: await complete(url, name) for name in ("base", "base:one", "base:two")}
        assert [cached(answer) for answer in first.values()] == [0, 0, 0]
        texts = {answer["choices"][0]["text"] for answer in first.values()}
        assert len(texts) == 3
        for name, field in (
            ("one", None),
            ("base", "one"),
            (None, "one"),
            ("base:one", "one"),
            ("unknown", "one"),
        ):
            again = await complete(url, **{"model": name, **({"adapters": field} if field else {})})  # type: ignore[arg-type]
            assert again["choices"] == first["base:one"]["choices"], (name, field)
            assert again["model"] == "base:one"
            assert cached(again) > 80
        async with httpx2.AsyncClient() as client:
            metrics = (await client.get(f"{url}/metrics")).text
        assert 'trouper_adapter_requests_total{adapter="one",model_name="base"} 6.0' in metrics
        assert 'trouper_adapter_requests_total{adapter="two",model_name="base"} 1.0' in metrics
        assert runtime.health().scheduler.cache.waited == 0


async def test_nobody_waits_for_the_prefill_of_another_adapter(files: Path) -> None:
    async with serving(files, gather_ms=50) as (runtime, url):
        answers = dict[str, dict[str, Any]]()

        async def ask(name: str) -> None:
            answers[name] = await complete(url, name)

        async with trio.open_nursery() as nursery:
            for name in ("base", "one", "two"):
                nursery.start_soon(ask, name)
        assert [cached(answer) for answer in answers.values()] == [0, 0, 0]
        assert runtime.health().scheduler.cache.waited == 0


async def test_blocks_on_disk_are_an_adapters_own_by_its_content(
    files: Path, tmp_path: Path
) -> None:
    """Not by its name: other files under the same name find nothing."""
    changed = save_adapter(build("llama"), tmp_path / "one", 9)
    long = 4 * PROMPT
    disk = {"no_ssd": False, "ssd_cache_dir": tmp_path / "blocks"}
    async with serving(files, **disk) as (_, url):
        assert cached(await complete(url, "one", prompt=long)) == 0
    async with serving(files, **disk) as (runtime, url):
        # First: a server that has measured nothing reads, on a device that computes such a prompt
        # in less time, too.
        assert cached(await complete(url, "one", prompt=long)) > 0
        assert runtime.health().scheduler.cache.hits_disk > 0
        assert [cached(await complete(url, name, prompt=long)) for name in ("two", "base")] == [
            0,
            0,
        ]
    async with serving(files, adapter=flags([changed]), **disk) as (_, url):
        assert cached(await complete(url, "one", prompt=long)) == 0


async def test_the_official_client(files: Path) -> None:
    async with serving(files) as (_, url):

        def talk() -> None:
            with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
                models = {model.id: model.model_dump() for model in client.models.list()}
                assert list(models) == ["base", "base:one", "base:two"]
                assert models["base:one"]["parent"] == "base"
                assert models["base:one"]["root"] == str(files / "one")
                assert "parent" not in models["base"]
                assert client.models.retrieve("base:two").model_dump()["root"] == str(files / "two")
                whole, *parts = (
                    client.completions.create(
                        model="base:two", prompt=PROMPT, max_tokens=6, temperature=0
                    ),
                    *client.completions.create(
                        model="base:two", prompt=PROMPT, max_tokens=6, temperature=0, stream=True
                    ),
                )
                assert {part.model for part in parts} == {"base:two"}
                assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
                with pytest.raises(
                    openai.NotFoundError, match=r"has no adapter 'three'; it has 'one', 'two'"
                ):
                    client.completions.create(model="base:three", prompt=PROMPT)
                with pytest.raises(openai.NotFoundError, match=r"it has 'one', 'two'"):
                    client.models.retrieve("base:three")

        await trio.to_thread.run_sync(talk)
        assert (await complete(url, "base", adapters="three"))["status"] == 404
        assert (await complete(url, "base:one", adapters="two"))["error"]["param"] == "adapters"


@pytest.mark.parametrize("text", ["one", "=dir", "one=", "a:b=dir"])
def test_what_names_no_adapter(text: str) -> None:
    with pytest.raises(SettingsInvalid, match="is not NAME=DIR"):
        Settings(adapter=(text,))


def test_adapters_that_exclude_each_other() -> None:
    with pytest.raises(SettingsInvalid, match="given twice"):
        Settings(adapter=("one=a", "one=b"))
    with pytest.raises(SettingsInvalid, match="exclude each other"):
        Settings(adapter=("one=a",), adapter_path="b")
