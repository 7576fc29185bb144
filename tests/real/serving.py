"""The whole graph on a real model, without HTTP, and what one request heard of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import patch

import attrs
import mlx.core as mx
import numpy as np
import trio

from tests.reuse.serving import not_warmed_up
from trouper import Answer, Generate, Runtime, Settings, run_runtime
from trouper.engine import host
from trouper.engine.kv import model_caches
from trouper.engine.kv.quantized_kv import QuantizedSlots
from trouper.engine.spec_decode.verification_spans import Spans
from trouper.engine.step import Launched, StepEngine
from trouper.protocol.plans import Plan
from trouper.protocol.replies import TokenLogprobs

CLOSE = 5e-4
"""Log-probabilities of one row in other company differ by 1e-4 at most."""
ROUNDING = 2e-4
"""What differs by less than this between two tokens' logits may be drawn either way."""
KV_ROUNDING = 1e-3
"""Of a quantization step. Rounding moves a value by 2e-5 of its step in the median and by 6e-4 at
most (200,000 values of three families), so what lies so near to an edge may be written as either
neighbour. One code that differs moves log-probabilities by up to 4e-2 in these models."""
PATIENCE_S = 120
Start = Callable[..., Awaitable[None]]
"""Runs a runtime with its settings, and says when it is there."""


class ShakenSlots(QuantizedSlots):
    """Each value is off by a little of its step before it is written."""

    def _quantized(self, side: mx.array) -> list[mx.array]:
        parts = super()._quantized(side)
        if len(parts) == 1:
            return parts
        ShakenKv.shakes += 1
        steps = mx.repeat(mx.abs(parts[1]), self._kv.group_size, axis=-1)
        off = mx.random.uniform(
            -KV_ROUNDING, KV_ROUNDING, side.shape, key=mx.random.key(ShakenKv.shakes)
        )
        return super()._quantized(side + off * steps)


class ShakenKv(StepEngine):
    """Quantized KV is off by a little of its steps, as rounding could have it."""

    shakes = 0

    def launch(self, plan: Plan) -> Launched:
        """The slots of a bank are made when a row of its length is opened."""
        with patch.object(model_caches, "QuantizedSlots", ShakenSlots):
            return super().launch(plan)


class Shaken(ShakenKv):
    """Every logit is off by a little, too. Where this changes a row's tokens, rounding could have
    done so."""

    def _sample(self, logits: mx.array, spans: Spans | None = None) -> Any:
        ShakenKv.shakes += 1
        shaken = logits + ROUNDING * mx.random.normal(
            logits.shape, key=mx.random.key(ShakenKv.shakes)
        )
        return super()._sample(shaken, spans)


def settings_of(path: str | None, **settings: Any) -> Settings:
    """No path: the embedded model."""
    usual = {"no_ssd": True, "gather_ms": 0, "kv_bits": 0, "block_size": 16, "snapshot_tokens": 32}
    return Settings(model=path, **(usual | settings))


@asynccontextmanager
async def running(
    path: str | None,
    engine: type[StepEngine] = StepEngine,
    start: Start = run_runtime,
    **settings: Any,
) -> AsyncIterator[Runtime]:
    """From start to drain."""
    with patch.object(host, "StepEngine", engine), not_warmed_up():
        async with trio.open_nursery() as nursery:
            runtime: Runtime = await nursery.start(start, settings_of(path, **settings))
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


async def hear(
    answer: Answer, most: int | None = None, *, begun: Callable[[], object] = lambda: None
) -> Heard:
    """To its end, until somebody closes it, or so many deltas: then this does. `begun` is called
    with each delta."""
    deltas = []
    with suppress(trio.ClosedResourceError):
        async for delta in answer:
            deltas.append(delta)
            begun()
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
        (n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


def apart(one: Sequence[TokenLogprobs], other: Sequence[TokenLogprobs]) -> float:
    """The largest difference between the numbers, as far as the tokens are the same."""
    same = common([at.token for at in one], [at.token for at in other])
    pairs = [
        (value, its)
        for mine, theirs in zip(one[:same], other[:same], strict=True)
        for value, its in [
            (mine.logprob, theirs.logprob),
            *((a, b) for (_, a), (_, b) in zip(mine.top, theirs.top, strict=True)),
        ]
    ]
    return max((abs(value - its) for value, its in pairs), default=0.0)


def assert_close(
    got: Sequence[TokenLogprobs],
    wanted: Sequence[TokenLogprobs],
    told: str = "",
    close: float = CLOSE,
) -> None:
    """The same tokens, and the same numbers; those of nearly equal ones may come in either
    order."""
    assert [at.token for at in got] == [at.token for at in wanted], told
    for place, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        where = f"{told}: place {place}: {mine} where {theirs} is right"
        assert abs(mine.logprob - theirs.logprob) < close, where
        assert len(mine.top) == len(theirs.top), where
        if mine.top:
            values = np.array([value for _, value in mine.top])
            assert np.abs(values - [value for _, value in theirs.top]).max() < close, where
            known = dict(theirs.top)
            last = theirs.top[-1][1]
            assert all(abs(known.get(token, last) - value) < close for token, value in mine.top), (
                where
            )
