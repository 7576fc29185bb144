"""The whole graph on a tiny random model, without HTTP: what it says, and how much of it came from the cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import attrs
import numpy as np
import trio

from tests.families import save
from tests.family_configs import VOCABULARY
from trouper import Generate, Runtime, Sampling, Settings, TokenPrompt, run_runtime
from trouper.protocol.settings import ByteSize

GREEDY = Sampling(temperature=0)
CLOSE = 5e-4
"""Between log-probabilities of different batches and chunks, in float32; gaps of the tiny models are ten times that."""
BLOCK = 16


@attrs.frozen
class Said:
    """One answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int = attrs.field(eq=False, default=0)

    def equals(self, cold: Said) -> bool:
        return self.tokens == cold.tokens and bool(np.allclose(self.logprobs, cold.logprobs, atol=CLOSE))


@cache
def model_of(family: str) -> str:
    return str(save(family, Path(mkdtemp(prefix="family-")) / family))


def settings_of(family: str, **more: Any) -> Settings:
    common = {
        "model": model_of(family), "no_ssd": "ssd_cache_dir" not in more, "block_size": BLOCK, "snapshot_tokens": BLOCK,
        "gather_ms": 0, "cache_memory": ByteSize("64MB"), "request_timeout_s": 0,
    }  # fmt: skip
    return Settings(**{**common, **more})


@asynccontextmanager
async def running(family: str, **more: Any) -> AsyncIterator[Runtime]:
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(run_runtime, settings_of(family, **more))
        yield runtime
        await runtime.drain(20)


async def say(runtime: Runtime, prompt: Sequence[int], tokens: int = 6, **more: Any) -> Said:
    more.setdefault("sampling", GREEDY)
    request = Generate(
        request_id="r", prompt=TokenPrompt(tuple(prompt)), max_tokens=tokens, ignore_eos=True, logprobs=0, **more
    )
    said: list[int] = []
    logprobs: list[float] = []
    with await runtime.submit(request) as answer:
        async for delta in answer:
            said += delta.tokens
            logprobs += [at.logprob for at in delta.logprobs]
        return Said(tuple(said), tuple(logprobs), answer.cached_tokens)


async def say_all(runtime: Runtime, prompts: Sequence[Sequence[int]], tokens: int = 6, **more: Any) -> list[Said]:
    """Side by side."""
    answers: dict[int, Said] = {}

    async def one(place: int) -> None:
        answers[place] = await say(runtime, prompts[place], tokens, **more)

    async with trio.open_nursery() as nursery:
        for place in range(len(prompts)):
            nursery.start_soon(one, place)
    return [answers[place] for place in range(len(prompts))]


def text(length: int, seed: int) -> tuple[int, ...]:
    """Without the token that ends a turn."""
    return tuple(np.random.RandomState(seed).randint(1, VOCABULARY - 1, length).tolist())
