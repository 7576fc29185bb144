"""The whole graph on a real model, without HTTP, and what one request heard of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import patch

import attrs
import mlx.core as mx
import numpy as np
import trio

from trouper import Answer, Generate, Runtime, Settings, run_runtime
from trouper.engine import host
from trouper.engine.spans import Spans
from trouper.engine.step import StepEngine
from trouper.protocol.replies import TokenLogprobs

CLOSE = 5e-4
"""Log-probabilities of one row in other company differ by 1e-4 at most."""
ROUNDING = 2e-4
"""What differs by less than this between two tokens' logits may be drawn either way."""
PATIENCE_S = 120


class Shaken(StepEngine):
    """Every logit is off by a little. Where this changes a row's tokens, rounding could have done so."""

    shakes = 0

    def _sample(self, logits: mx.array, spans: Spans | None = None) -> Any:
        Shaken.shakes += 1
        shaken = logits + ROUNDING * mx.random.normal(logits.shape, key=mx.random.key(Shaken.shakes))
        return super()._sample(shaken, spans)


@asynccontextmanager
async def running(path: str | None, engine: type[StepEngine] = StepEngine, **settings: Any) -> AsyncIterator[Runtime]:
    """From start to drain. No path: the embedded model."""
    chosen = {"no_ssd": True, "gather_ms": 0, "kv_bits": 0, "block_size": 16, "snapshot_tokens": 32, **settings}
    with patch.object(host, "StepEngine", engine):
        async with trio.open_nursery() as nursery:
            runtime: Runtime = await nursery.start(run_runtime, Settings(model=path, **chosen))
            with trio.fail_after(PATIENCE_S):
                yield runtime
                assert await runtime.drain(10)


@attrs.frozen
class Heard:
    """An answer, or its beginning if the client left: then there is no `reason`."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    reason: str | None = None
    matched: str | int | None = None


async def hear(answer: Answer, most: int | None = None) -> Heard:
    """To its end, until somebody closes it, or so many deltas: then this does."""
    deltas = []
    with suppress(trio.ClosedResourceError):
        async for delta in answer:
            deltas.append(delta)
            if len(deltas) == most:
                answer.close()
    return Heard(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(at for delta in deltas for at in delta.logprobs),
        answer.accepted.prompt_tokens,
        answer.prompt_logprobs,
        answer.finished.reason if answer.finished else None,
        answer.finished.matched_stop if answer.finished else None,
    )


async def ask(runtime: Runtime, *requests: Generate) -> list[Heard]:
    """All at once, queued in this order."""
    answers = [await runtime.submit(request) for request in requests]
    return [await hear(answer) for answer in answers]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens they share from the beginning on."""
    return next(
        (n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def assert_close(got: Sequence[TokenLogprobs], wanted: Sequence[TokenLogprobs], told: str = "") -> None:
    """The same tokens, and the same numbers; those of nearly equal ones may come in either order."""
    assert [at.token for at in got] == [at.token for at in wanted], told
    for place, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        where = f"{told}: place {place}: {mine} where {theirs} is right"
        assert abs(mine.logprob - theirs.logprob) < CLOSE, where
        assert len(mine.top) == len(theirs.top), where
        if mine.top:
            values = np.array([value for _, value in mine.top])
            assert np.abs(values - [value for _, value in theirs.top]).max() < CLOSE, where
            known = dict(theirs.top)
            last = theirs.top[-1][1]
            assert all(abs(known.get(token, last) - value) < CLOSE for token, value in mine.top), where
