"""LoRA adapters that are loaded and unloaded while the server runs, with a tiny real model; rows
with adapters that are preempted or resumed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from mlx_lm.models import llama

from tests.adapters import flags, save_adapter
from tests.families import build, prompts, save
from tests.real.serving import running
from tests.real.test_adapters import cached, complete, serving
from tests.real.test_preemption import fine_capacities
from trouper import (
    Generate,
    ModelManager,
    Runtime,
    Sampling,
    ServerSettings,
    Settings,
    TokenPrompt,
    run_models,
)
from trouper.protocol.problems import ModelUnusable

NAMES = ("one", "two", "three")
PROMPTS = prompts((20, 33, 47))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    save("llama", directory / "base")
    for number, name in enumerate(NAMES):
        save_adapter(build("llama"), directory / name, number, rank=number + 2)
    return directory


async def ask(url: str, path: str, **body: Any) -> tuple[int, str]:
    async with httpx2.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{url}/v1/{path}", json=body)
    return answer.status_code, answer.text


async def models_of(url: str) -> list[str]:
    async with httpx2.AsyncClient(timeout=60) as client:
        return [model["id"] for model in (await client.get(f"{url}/v1/models")).json()["data"]]


def wish(prompt: Sequence[int], adapter: str, tokens: int = 40) -> Generate:
    return Generate(
        request_id=f"{adapter or 'base'}-{len(prompt)}",
        prompt=TokenPrompt(tuple(prompt)),
        adapter=adapter,
        max_tokens=tokens,
        ignore_eos=True,
        sampling=Sampling(temperature=0),
    )


async def tokens_of(runtime: Runtime, request: Generate) -> list[int]:
    with await runtime.submit(request) as answer:
        return [token async for delta in answer for token in delta.tokens]


async def test_they_come_and_go_as_in_vllm(files: Path, tmp_path: Path) -> None:
    other = save_adapter(build("llama"), tmp_path / "other", 9)
    async with serving(files) as (_, url):
        first = {name: await complete(url, name) for name in ("base", "one", "two")}
        added = await ask(
            url, "load_lora_adapter", lora_name="three", lora_path=str(files / "three")
        )
        assert added == (200, "Success: LoRA adapter 'three' added successfully.")
        assert await models_of(url) == ["base", "base:one", "base:two", "base:three"]
        three = await complete(url, "base:three")
        assert (
            three["choices"] not in [answer["choices"] for answer in first.values()]
            and cached(three) == 0
        )
        status, text = await ask(url, "load_lora_adapter", lora_name="three", lora_path=str(other))
        assert (
            status == 400
            and "The lora adapter 'three' has already been loaded." in text
            and "InvalidUserInput" in text
        )
        removed = await ask(url, "unload_lora_adapter", lora_name="one")
        assert removed == (200, "Success: LoRA adapter 'one' removed successfully.")
        assert (await complete(url, "base:one"))["status"] == 404
        for name in ("base", "two"):
            assert (await complete(url, name))["choices"] == first[name]["choices"]
        await ask(url, "load_lora_adapter", lora_name="first", lora_path=str(files / "one"))
        again = await complete(url, "first")
        assert again["choices"] == first["one"]["choices"] and cached(again) > 80, (
            "blocks are of the content, not the name"
        )
        await ask(
            url, "load_lora_adapter", lora_name="first", lora_path=str(other), load_inplace=True
        )
        changed = await complete(url, "first")
        assert changed["choices"] != again["choices"] and cached(changed) == 0
        for name in ("first", "two", "three"):
            assert (await ask(url, "unload_lora_adapter", lora_name=name))[0] == 200
        assert await models_of(url) == ["base"]
        assert (await complete(url, "base"))["choices"] == first["base"]["choices"]


async def test_the_model_does_not_answer_for_an_adapter_that_was_unloaded(
    files: Path, tmp_path: Path
) -> None:
    """The only model answers to any name, but whoever asks an adapter must not get the model's own
    answer as if it were the adapter's."""
    async with serving(files) as (_, url):
        for name in NAMES[:2]:
            assert (await ask(url, "unload_lora_adapter", lora_name=name))[0] == 200
            for asked in (name, f"base:{name}"):
                refused = await complete(url, asked)
                assert refused["status"] == 404 and refused["error"]["code"] == "adapter_not_found"
        status, _ = await ask(
            url,
            "load_lora_adapter",
            lora_name="two",
            lora_path=str(tmp_path / "none"),
            load_inplace=True,
        )
        assert status == 404 and (await complete(url, "two"))["status"] == 404
        assert (await complete(url, "gpt-4o"))["model"] == "base"
        await ask(url, "load_lora_adapter", lora_name="one", lora_path=str(files / "one"))
        assert (await complete(url, "one"))["model"] == "base:one"
        assert (await complete(url, "two"))["status"] == 404


async def test_what_cannot_be_is_refused_as_in_vllm(files: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "adapter_config.json").write_text("{}")
    (tmp_path / "bad" / "adapters.safetensors").write_bytes(b"no weights")
    async with serving(files) as (_, url):
        status, text = await ask(
            url, "load_lora_adapter", lora_name="x", lora_path=str(tmp_path / "none")
        )
        assert (
            status == 404
            and "Loading lora x failed" in text
            and "has no adapter" in text
            and "NotFoundError" in text
        )
        long = f"{tmp_path}/{'long/' * 100}"
        status, text = await ask(url, "load_lora_adapter", lora_name="x", lora_path=long)
        assert status == 404 and "has no adapter" in text, "as long as a path may be"
        status, text = await ask(
            url, "load_lora_adapter", lora_name="x", lora_path=str(tmp_path / "bad")
        )
        assert status == 400 and "is truncated" in text and "BadRequestError" in text
        status, text = await ask(url, "unload_lora_adapter", lora_name="x")
        assert status == 404 and "The lora adapter 'x' cannot be found." in text
        for wrong in ("a:b", "a=b", "base", " "):
            status, text = await ask(
                url, "load_lora_adapter", lora_name=wrong, lora_path=str(files / "one")
            )
            assert (status, "lora_name" in text) == (400, True)
        assert "lora_path" in (await ask(url, "load_lora_adapter", lora_name="x"))[1]
        assert await models_of(url) == ["base", "base:one", "base:two"]


async def test_rows_that_run_are_not_disturbed_and_end_before_their_adapter(files: Path) -> None:
    async with running(
        str(files / "base"), adapter=flags([files / "one", files / "two"]), self_check="off"
    ) as runtime:
        undisturbed = {
            name: await tokens_of(runtime, wish(PROMPTS[0], name, 40))
            for name in ("", "one", "two")
        }
        answers, begun, unloaded = dict[str, list[int]](), trio.Event(), trio.Event()

        async def answer(name: str) -> None:
            with await runtime.submit(wish(PROMPTS[0], name, 40)) as heard:
                tokens = list((await heard.next()).tokens)  # type: ignore[union-attr]
                begun.set()
                tokens += [token async for delta in heard for token in delta.tokens]
                assert name != "one" or not unloaded.is_set()
            answers[name] = tokens

        async def unload() -> None:
            await runtime.unload_adapter("one")
            unloaded.set()

        async with trio.open_nursery() as nursery:
            for name in undisturbed:
                nursery.start_soon(answer, name)
            await begun.wait()
            nursery.start_soon(unload)
            nursery.start_soon(runtime.load_adapter, "three", str(files / "three"))
        assert answers == undisturbed and unloaded.is_set()
        assert [card.name for card in runtime.adapters] == ["two", "three"]
        assert await tokens_of(runtime, wish(PROMPTS[0], "two", 40)) == undisturbed["two"]


async def test_an_adapter_of_a_model_that_is_unloaded_meanwhile_is_no_crash(files: Path) -> None:
    """Found by use: an adapter and its model were unloaded at once, and one of the two was a 500 of
    an internal error."""
    async with running(
        str(files / "base"), adapter=flags([files / "one"]), self_check="off"
    ) as runtime:
        pass
    for change in (
        partial(runtime.load_adapter, "two", str(files / "two")),
        partial(runtime.unload_adapter, "one"),
    ):
        with pytest.raises(ModelUnusable, match="the model was unloaded meanwhile"):
            await change()


async def test_an_aborted_row_is_gone_before_its_adapter(files: Path) -> None:
    async with running(
        str(files / "base"), adapter=flags([files / "one", files / "two"]), self_check="off"
    ) as runtime:
        wanted = await tokens_of(runtime, wish(PROMPTS[0], "two"))
        for _ in range(3):
            with await runtime.submit(wish(PROMPTS[1], "one", 1000)) as heard:
                await heard.next()
            await runtime.unload_adapter("one")
            assert await tokens_of(runtime, wish(PROMPTS[0], "two")) == wanted
            await runtime.load_adapter("one", str(files / "one"))


async def test_an_adapter_stays_when_its_model_sleeps_and_wakes(files: Path) -> None:
    settings = Settings(model=str(files / "base"), no_ssd=True, self_check="off")
    async with trio.open_nursery() as nursery:
        manager: ModelManager = await nursery.start(run_models, [settings], ServerSettings())
        await manager.control.load_adapter(None, "one", str(files / "one"))

        async def tokens() -> list[int]:
            lease = await manager.lease(None)
            try:
                return await tokens_of(lease.runtime, wish(PROMPTS[0], "one"))
            finally:
                lease.release()

        first = await tokens()
        asleep = manager.control.unload(None, sleep=True)
        await asleep.done.wait()
        assert [entry.adapters for entry in manager.entries()] == [("one",)]
        assert await tokens() == first
        await manager.control.unload_adapter(None, "one")
        assert [entry.adapters for entry in manager.entries()] == [()]
        assert await manager.drain(5)


# -- rows with adapters that do not run through --------------------------------------------------


async def all_of(runtime: Runtime, tokens: int) -> dict[str, list[int]]:
    found = dict[str, list[int]]()

    async def one(request: Generate) -> None:
        found[request.request_id] = await tokens_of(runtime, request)

    async with trio.open_nursery() as nursery:
        for prompt in PROMPTS:
            for name in ("", "one", "two"):
                nursery.start_soon(one, wish(prompt, name, tokens))
    return found


async def test_preempted_rows_keep_their_adapters(files: Path) -> None:
    given: dict[str, Any] = {"adapter": flags([files / "one", files / "two"]), "self_check": "off"}
    with fine_capacities():
        async with running(str(files / "base"), **given) as runtime:
            undisturbed = await all_of(runtime, 60)
            limit = 3 * runtime.model.kv.row_bytes(len(PROMPTS[-1]) + 60)
        assert len({tuple(tokens) for tokens in undisturbed.values()}) == 9
        async with running(str(files / "base"), kv_memory=limit, **given) as runtime:
            assert await all_of(runtime, 60) == undisturbed
            assert runtime.health().scheduler.preemptions > 0


async def test_resumed_rows_keep_their_adapters_also_those_loaded_at_run_time(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, plain = [0], llama.Model.__call__

    def crashing(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] -= 1
        if calls[0] == 0:
            raise RuntimeError("the device caught fire")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(llama.Model, "__call__", crashing)
    async with running(
        str(files / "base"), adapter=flags([files / "one"]), self_check="off"
    ) as runtime:
        await runtime.load_adapter("two", str(files / "two"))
        undisturbed = await all_of(runtime, 40)
    async with running(
        str(files / "base"), adapter=flags([files / "one"]), self_check="off"
    ) as runtime:
        await runtime.load_adapter("two", str(files / "two"))
        calls[0] = 20
        assert await all_of(runtime, 40) == undisturbed
        recovery = runtime.health().scheduler.recovery
        assert recovery.crashes == 1 and recovery.resumed > 0
