"""Memory of LoRA adapters that are loaded at run time: planned before anything is loaded, and
counted as the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.adapters import save_adapter
from tests.families import build
from tests.real.test_adapters import complete, files, serving
from tests.real.test_adapters_at_run_time import ask, models_of
from tests.reuse.serving import until
from trouper import Runtime
from trouper.actors.scheduling.kv_memory import step_bytes
from trouper.engine import adapters_at_run_time
from trouper.engine.platform import device
from trouper.engine.platform.device import WIRED

__all__ = ("files",)
BYTES = ("weights_bytes", "adapter_bytes", "adapter_reserved_bytes")


@pytest.fixture(scope="module")
def large(files: Path) -> Path:
    """An adapter of a higher rank than those of the server."""
    return save_adapter(build("llama"), files / "large", 7, rank=40)


async def memory_of(url: str) -> dict[str, Any]:
    async with httpx2.AsyncClient(timeout=60) as client:
        health: dict[str, Any] = (await client.get(f"{url}/health")).json()
    memory: dict[str, Any] = health["memory"]
    return memory


async def limited(runtime: Runtime, spare_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has room for the model, one step and so much more, beside what other tests of this
    process have left."""
    await until(lambda: runtime.health().memory.fixed_bytes > 0)
    fixed = max(
        runtime.weights_bytes, runtime.health().memory.fixed_bytes + runtime.model.adapter_bytes
    )
    needed = fixed + step_bytes(runtime.model, runtime.settings) + spare_bytes
    limit = int(needed / runtime.settings.memory_fraction) + 1
    monkeypatch.setattr(device, "memory_limit_bytes", lambda *_: limit)
    await until(lambda: runtime.health().memory.limit_bytes == limit)


async def test_its_bytes_count_as_the_models_from_the_start_and_as_they_come_and_go(
    files: Path, large: Path
) -> None:
    async with serving(files, janitor_interval_s=0.1) as (runtime, url):
        card, before = runtime.model, await memory_of(url)
        assert (
            before["adapter_bytes"] == card.adapter_bytes > 0
            and before["weights_bytes"] == card.weights_bytes
        )
        assert (await ask(url, "load_lora_adapter", lora_name="large", lora_path=str(large)))[
            0
        ] == 200
        after = await memory_of(url)
        added = after["adapter_bytes"] - before["adapter_bytes"]
        assert added > 5 * before["adapter_bytes"] and after["adapter_reserved_bytes"] == 0
        assert after["weights_bytes"] == before["weights_bytes"] + added == runtime.weights_bytes
        assert list(WIRED._held.values()) == [after["weights_bytes"]]
        assert (await ask(url, "unload_lora_adapter", lora_name="large"))[0] == 200
        assert (await memory_of(url))["weights_bytes"] == before["weights_bytes"]


async def test_one_that_does_not_fit_is_refused_before_anything_is_loaded(
    files: Path, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(files, janitor_interval_s=0.05) as (runtime, url):
        before = await memory_of(url)
        await limited(runtime, 10**6, monkeypatch)
        with monkeypatch.context() as patched:
            patched.setattr(adapters_at_run_time, "adding", None)
            status, text = await ask(
                url, "load_lora_adapter", lora_name="large", lora_path=str(large)
            )
        assert status == 507 and "insufficient_memory" in text and "lora_path" in text
        assert (
            "the adapter 'large' needs" in text
            and "are left beside the weights" in text
            and "unload another" in text
        )
        assert await models_of(url) == ["base", "base:one", "base:two"]
        after = await memory_of(url)
        assert [after[name] for name in BYTES] == [before[name] for name in BYTES]
        assert runtime.weights_bytes == before["weights_bytes"]
        await limited(runtime, 10**8, monkeypatch)
        assert (await ask(url, "load_lora_adapter", lora_name="large", lora_path=str(large)))[
            0
        ] == 200


async def test_one_for_which_the_device_has_no_memory_after_all_is_refused_and_the_model_serves_on(
    files: Path, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes")

    async with serving(files) as (_, url):
        before, first = await memory_of(url), await complete(url, "base:one")
        with monkeypatch.context() as patched:
            patched.setattr(adapters_at_run_time, "stacked", full)
            status, text = await ask(
                url, "load_lora_adapter", lora_name="large", lora_path=str(large)
            )
        assert status == 507 and "insufficient_memory" in text and "Unable to allocate" in text
        after = await memory_of(url)
        assert [after[name] for name in BYTES] == [before[name] for name in BYTES]
        assert (await complete(url, "base:one"))["choices"] == first["choices"]
        assert (await ask(url, "load_lora_adapter", lora_name="large", lora_path=str(large)))[
            0
        ] == 200
