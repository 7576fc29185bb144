"""F9, D8: what was computed with other weights is never used, however little they differ and
whatever the files say."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.families import prompts, reference, save
from trouper import Generate, Runtime, Sampling, Settings, TokenPrompt, run_runtime
from trouper.engine.adaptations import adaptation_registry
from trouper.engine.adaptations.adaptation_registry import Adaptation
from trouper.engine.loading.model_loading import load
from trouper.protocol.health import DirectoryStats
from trouper.storage import cache_fingerprint

PROMPT = prompts((100,))[0]
BLOCKS = -(-99 // 16)
"""The last one of them is not full."""
TOKENS = 12
TENSOR = "model.layers.0.self_attn.v_proj.weight"


@attrs.frozen
class Heard:
    """One prompt, asked of a runtime that was started for it."""

    tokens: list[int]
    hits_disk: int
    known_blocks: int
    """What lay in the directory for this model before."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The digests of files are remembered from the first look on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache_fingerprint, "YOUNG_S", -1.0)
    return save("llama", tmp_path / "llama")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


async def ask(model: Path, directory: Path) -> Heard:
    wish = Generate(
        request_id="one",
        prompt=TokenPrompt(tuple(PROMPT)),
        sampling=Sampling(temperature=0),
        max_tokens=TOKENS,
        ignore_eos=True,
    )
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(
            run_runtime, Settings(block_size=16, model=str(model), ssd_cache_dir=directory)
        )
        with trio.fail_after(30):
            known = await looked_through(runtime)
            with await runtime.submit(wish) as answer:
                tokens = [token async for delta in answer for token in delta.tokens]
            hits = runtime.health().scheduler.cache.hits_disk
            assert await runtime.drain(20)
    return Heard(tokens, hits, known.blocks)


async def looked_through(runtime: Runtime) -> DirectoryStats:
    """... and the scheduler has heard of it."""
    while not (seen := runtime.health().directory).attached or (seen.files and not seen.inspected):  # noqa: ASYNC110
        await trio.sleep(0.01)
    await wait_all_tasks_blocked(0.05)
    return seen


def own_answer(model: Path) -> list[int]:
    """What these weights say without any cache of ours."""
    return reference(
        load(Settings(block_size=16, model=str(model)), lambda _: None).model, PROMPT, TOKENS
    )


def change_one_value(model: Path) -> None:
    """Of 100,000. Size and modification time stay as they were."""
    path = model / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[TENSOR]
        assert entry["dtype"] == "F32"
        file.seek(8 + length + entry["data_offsets"][0])
        file.write(struct.pack("<f", 100.0))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )


def namespaces(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_dir()}


async def test_f9_d8_weights_changed_by_one_value(model: Path, directory: Path) -> None:
    first = await ask(model, directory)
    assert first == Heard(own_answer(model), 0, 0)
    before = namespaces(directory)
    assert len(before) == 1
    assert (directory.parent / "home" / "trouper" / "digests.json").exists(), (
        "this test is about remembered digests, too"
    )
    change_one_value(model)
    wanted = own_answer(model)
    assert wanted != first.tokens, "the value matters"
    assert await ask(model, directory) == Heard(wanted, 0, 0)
    assert len(namespaces(directory) - before) == 1


async def test_the_same_weights_are_known_again(model: Path, directory: Path) -> None:
    """Control: nothing else keeps the disk from being used."""
    first = await ask(model, directory)
    again = await ask(model, directory)
    assert again.tokens == first.tokens
    assert (first.hits_disk, again.hits_disk) == (0, BLOCKS)
    assert again.known_blocks >= BLOCKS


def test_f9_what_adapts_a_model_tells_apart(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of LongRoPE's short factors stay on disk when a new version has the long ones."""

    def content() -> str:
        settings = Settings(block_size=16, model=str(model), ssd_cache_dir=directory)
        return load(settings, lambda _: None).card.fingerprint

    before = content()
    rule = Adaptation("another rule", lambda *_: True)
    monkeypatch.setattr(adaptation_registry, "REGISTRY", [rule])
    assert len({before, content()}) == 2


async def test_without_the_fingerprint_other_weights_blocks_are_used(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the test above would notice, in what is counted and in what is said."""
    monkeypatch.setattr(
        "trouper.engine.loading.model_loading.fingerprint", lambda *_: "always the same"
    )
    await ask(model, directory)
    change_one_value(model)
    wrong = await ask(model, directory)
    assert wrong.hits_disk == BLOCKS
    assert wrong.tokens != own_answer(model)
