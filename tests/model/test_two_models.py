"""Two real models in one process, each on a thread of its own: neither waits for the other, and
both are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.families import prompts, reference, save
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
from trouper.engine.loading.model_loading import load

EMBEDDED = "SmolLM2-135M-Instruct"
QUESTION = TokenPrompt((1, 28, 30, 34, 40))


async def tokens(runtime: Runtime, prompt: TokenPrompt, count: int) -> list[int]:
    wish = Generate(
        request_id="a",
        prompt=prompt,
        max_tokens=count,
        ignore_eos=True,
        sampling=Sampling(temperature=0),
    )
    with await runtime.submit(wish) as answer:
        return [token async for delta in answer for token in delta.tokens]


@pytest.mark.long
async def test_alternating_requests(tmp_path: Path) -> None:
    """The tiny model's requests begin and end while the embedded one streams."""
    tiny = str(save("llama", tmp_path / "tiny"))
    own = load(Settings(model=tiny, no_ssd=True), lambda _: None).model
    asked = prompts((5, 40, 17))
    wanted = [reference(own, prompt, 20) for prompt in asked]
    settings = [Settings(no_ssd=True), Settings(model=tiny, no_ssd=True)]
    async with trio.open_nursery() as nursery:
        manager: ModelManager = await nursery.start(
            run_models, settings, ServerSettings(served_model_name=(f"tiny={tiny}",))
        )
        assert [one.names for one in manager.entries()] == [(EMBEDDED,), ("tiny", tiny)]
        large, small = await manager.lease(EMBEDDED), await manager.lease("tiny")
        alone = await tokens(large.runtime, QUESTION, 40)
        answers: list[list[int]] = []

        async def stream() -> None:
            answers.append(await tokens(large.runtime, QUESTION, 40))

        async with trio.open_nursery() as streams:
            streams.start_soon(stream)
            for prompt, right in zip(asked, wanted, strict=True):
                assert await tokens(small.runtime, TokenPrompt(tuple(prompt)), 20) == right
                assert not answers, "the embedded model's stream is not over"
        assert answers == [alone]
        large.release()
        small.release()
        assert await manager.drain(10)
