"""The whole graph on a tiny model, without HTTP: what was asked, what was heard, what of it came
from the cache.

*Cold* is what a runtime without a cache answers, one request at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import numpy as np
import trio

from tests import arithmetic
from tests.arithmetic import CLOSE
from tests.families import END, build, save
from tests.family_configs import Config
from trouper import Answer, Generate, Runtime, Sampling, Settings, TokenPrompt, run_runtime
from trouper.actors.scheduling.cache_namespace import NO_SCOPE
from trouper.engine import host
from trouper.engine.kv.kv_layout import kv_layout
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.passes.pass_shapes import PREPARED_CARD
from trouper.engine.step import Launched, StepEngine
from trouper.protocol.health import DirectoryStats, SchedulerStats
from trouper.protocol.kv import KvLayout
from trouper.protocol.plans import Plan
from trouper.protocol.replies import TokenLogprobs
from trouper.protocol.requests import CacheScope

GREEDY = Sampling(temperature=0)
BLOCK, SNAPSHOT = 16, 32
TOKENS = 6
CERTAIN = max(2e-3, arithmetic.CERTAIN)
"""A greedy token is certain when the next best is further away than this."""
Tokens = tuple[int, ...]


def text(tokens: int, seed: int) -> Tokens:
    """Random tokens, none of which ends a turn."""
    return tuple(np.random.RandomState(seed).randint(1, END, tokens).tolist())


@attrs.frozen
class Tiny:
    """A saved model."""

    name: str
    path: str
    layout: KvLayout

    @classmethod
    def saved(cls, name: str, directory: Path, config: Config | None = None) -> Tiny:
        path = save(name, directory / name, config)
        return cls(name, str(path), kv_layout(build(name, config=config), PLAIN))

    def reach(self, shared: int, *snapshots: int) -> int:
        """How many tokens are reused where so many are known: all, or up to the deepest
        snapshot."""
        return (
            max(place for place in (0, *snapshots) if place <= shared)
            if self.layout.needs_snapshots
            else shared
        )


@attrs.frozen
class Ask:
    prompt: Tokens
    sampling: Sampling = GREEDY
    tokens: int = TOKENS
    salt: str = ""
    scope: CacheScope = NO_SCOPE

    def request(self) -> Generate:
        return Generate(
            request_id="reuse",
            prompt=TokenPrompt(self.prompt),
            sampling=self.sampling,
            max_tokens=self.tokens,
            ignore_eos=True,
            logprobs=3,
            cache_salt=self.salt,
            cache_scope=self.scope,
        )


@attrs.frozen
class Heard:
    """A whole answer."""

    ask: Ask
    tokens: Tokens
    logprobs: tuple[TokenLogprobs, ...]
    cached: int
    prompt: Tokens

    @property
    def text(self) -> Tokens:
        return self.prompt + self.tokens

    @property
    def computed(self) -> int:
        """Tokens whose KV there is: the last one of an answer is never fed."""
        return len(self.text) - 1


@attrs.frozen
class Served:
    """A running runtime."""

    runtime: Runtime

    @property
    def stats(self) -> SchedulerStats:
        return self.runtime.health().scheduler

    @property
    def directory(self) -> DirectoryStats:
        return self.runtime.health().directory

    async def submit(self, ask: Ask) -> Answer:
        return await self.runtime.submit(ask.request())

    async def ask(self, *asks: Ask) -> list[Heard]:
        """All of them at once, queued in this order."""
        answers = [await self.submit(ask) for ask in asks]
        return [await hear(ask, answer) for ask, answer in zip(asks, answers, strict=True)]

    async def one(self, prompt: Tokens, **more: Any) -> Heard:
        [heard] = await self.ask(Ask(prompt, **more))
        return heard


async def hear(ask: Ask, answer: Answer) -> Heard:
    with answer:
        deltas = [delta async for delta in answer]
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    logprobs = tuple(each for delta in deltas for each in delta.logprobs)
    return Heard(ask, tokens, logprobs, answer.cached_tokens, answer.accepted.prompt_tokens)


Before = Callable[[Plan, StepEngine], None]
"""Sees each plan on the engine's thread, before it is launched."""


def at_chunk(moments: Mapping[int, Callable[[], Awaitable[None]]]) -> Before:
    """Let something happen on Trio's thread while the engine is about to launch these of the plans
    that prefill."""
    chunks, token = count(), trio.lowlevel.current_trio_token()

    def before(plan: Plan, engine: StepEngine) -> None:
        moment = moments.get(next(chunks)) if plan.prefill else None
        if moment is not None:
            trio.from_thread.run(moment, trio_token=token)

    return before


def restoring_all() -> AbstractContextManager[object]:
    """Restore short prefixes, too, also on a device that computes them again."""
    return patch.dict(PREPARED_CARD, min_restored_tokens=0)


def not_warmed_up() -> AbstractContextManager[object]:
    """No steps but those of requests, also on a device that compiles its kernels at the start."""
    return patch.object(host.MlxEngine, "_warm_up", lambda engine: None)


@asynccontextmanager
async def serving(
    tiny: Tiny, before: Before | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """A runtime from start to drain. Nothing on disk unless the settings say where."""

    class Watched(StepEngine):
        def launch(self, plan: Plan) -> Launched:
            if before is not None:
                before(plan, self)
            return super().launch(plan)

    wanted = {
        "block_size": BLOCK,
        "snapshot_tokens": SNAPSHOT,
        "kv_bits": 0,
        "no_ssd": "ssd_cache_dir" not in settings,
        **settings,
    }
    with patch.object(host, "StepEngine", Watched), not_warmed_up(), restoring_all():
        async with trio.open_nursery() as nursery:
            served = Served(await nursery.start(run_runtime, Settings(model=tiny.path, **wanted)))
            with trio.fail_after(60):
                yield served
                assert await served.runtime.drain(10)


async def until(true: Callable[[], bool]) -> None:
    """Facts wake nobody up, so this looks again and again."""
    while not true():  # noqa: ASYNC110
        await trio.sleep(0.001)


COLD: dict[tuple[Any, ...], Heard] = {}


async def cold(tiny: Tiny, asks: Sequence[Ask], **settings: Any) -> list[Heard]:
    """What each is answered alone, without a cache. Salts do not matter."""
    plain = [attrs.evolve(ask, salt="", scope=NO_SCOPE) for ask in asks]
    names = [(tiny.path, *settings.items(), ask) for ask in plain]
    missing = [(name, ask) for name, ask in zip(names, plain, strict=True) if name not in COLD]
    if missing:
        async with serving(tiny, cache_memory=0, **settings) as served:
            for name, ask in missing:
                [COLD[name]] = await served.ask(ask)
                assert COLD[name].cached == 0
    return [COLD[name] for name in names]


def agreed(heard: Heard, wanted: Heard, close: float = CLOSE, certain: float = CERTAIN) -> int:
    """How many tokens and log-probabilities were compared: all, unless a greedy token was not
    certain and is another. In TF32 a draw may be another, too: its scores are not known here, only
    the log-probabilities before it."""
    assert len(heard.tokens) == len(heard.logprobs) == len(wanted.tokens) == len(wanted.logprobs)
    for place, (mine, theirs) in enumerate(zip(heard.logprobs, wanted.logprobs, strict=True)):
        told = (
            f"token {place} of {heard.ask}, {heard.cached} cached: {mine} where {theirs} is right"
        )
        gap = np.abs(np.array(mine.top)[:, 1] - np.array(theirs.top)[:, 1]).max()
        assert gap < close, told
        if mine.token != theirs.token:
            lead = theirs.top[0][1] - theirs.top[1][1]
            assert lead < certain if heard.ask.sampling.greedy else arithmetic.TF32, told
            return place
        assert abs(mine.logprob - theirs.logprob) < close, told
    return len(heard.tokens)


async def assert_as_cold(tiny: Tiny, heard: Sequence[Heard], **settings: Any) -> None:
    wanted = await cold(tiny, [each.ask for each in heard], **settings)
    same = sum(agreed(mine, theirs) for mine, theirs in zip(heard, wanted, strict=True))
    assert same > 0.7 * sum(len(each.tokens) for each in heard), "too little was compared"
