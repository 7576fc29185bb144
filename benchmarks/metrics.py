"""What it costs to be measured, with an engine that computes nothing, so that all the time is the
server's own. `just bench-metrics`.

Steps of many fast streams with and without their observation, rounds of both one after the other;
the median of the rounds' ratios, where 1 is no cost. Then what a scrape takes, and what the end of
a request does. All of it is CPU time of the one thread, which neighbours disturb less.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from io import StringIO
from unittest.mock import patch

import trio
from prometheus_client import generate_latest

from tests.fakes import FakeEngine
from trouper import Generate, Runtime, Settings, TokenPrompt, run_runtime
from trouper.actors.runtime.answer import Answer
from trouper.actors.runtime.served_models import OneModel
from trouper.actors.scheduling.step_statistics import StepStatistics
from trouper.cli.log_setup import JsonLines, name_request
from trouper.protocol.health import SchedulerStats
from trouper.protocol.plans import RowId, Stepped
from trouper.protocol.record import RequestRecord
from trouper.web.metrics.collector import FamilyCollector, Metrics
from trouper.web.observability.access_log import log_record

RECORD = RequestRecord(
    request_id="a",
    model="fake",
    endpoint="/v1/chat/completions",
    reason="stop",
    prompt_tokens=9,
    generated_tokens=99,
    arrived_at=1.0,
    admitted_at=1.1,
    first_token_at=1.2,
    last_token_at=2.0,
    ended_at=2.0,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    trio.run(measure, options.rounds, options.streams, options.tokens)


async def measure(rounds: int, streams: int, tokens: int) -> None:
    settings = Settings(
        no_ssd=True, gather_ms=0, completion_batch_size=streams, request_timeout_s=0
    )
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(partial(run_runtime, settings, engine=FakeEngine()))
        ratios, rates = [], []
        for _ in range(rounds):
            plain = await streamed(runtime, streams, tokens, observed=False)
            observed = await streamed(runtime, streams, tokens, observed=True)
            ratios.append(observed / plain)
            rates.append(streams * tokens / observed)
        said = (
            f"{statistics.median(ratios):.3f} of the time without ({min(ratios):.3f} to "
            f"{max(ratios):.3f})"
        )
        print(
            f"{streams} streams, {statistics.median(rates):.0f} tokens a second in the middle: "
            f"{said}"
        )
        tell_step(streams)
        tell_scrape(runtime)
        tell_end()
        await runtime.drain(10)


async def streamed(runtime: Runtime, streams: int, tokens: int, *, observed: bool) -> float:
    """Seconds."""
    with ExitStack() as stack:
        if not observed:
            stack.enter_context(patch.object(StepStatistics, "stepped", lambda *_, **__: None))
            stack.enter_context(patch.object(Answer, "_note_token_time", lambda *_: None))
        told: list[RequestRecord] = []
        began = time.thread_time()
        async with trio.open_nursery() as nursery:
            for number in range(streams):
                nursery.start_soon(stream, runtime, number, tokens, told if observed else None)
        return time.thread_time() - began


async def stream(
    runtime: Runtime, number: int, tokens: int, told: list[RequestRecord] | None
) -> None:
    request = Generate(
        request_id=str(number),
        prompt=TokenPrompt((number + 1,)),
        max_tokens=tokens,
        ignore_eos=True,
    )
    with await runtime.submit(request, None if told is None else told.append) as answer:
        async for _ in answer:
            pass


def tell_step(rows: int) -> None:
    pulse, now = StepStatistics.of(SchedulerStats()), 0.0
    ids = tuple(RowId(number) for number in range(rows))
    stepped = Stepped(0, ids, tuple(range(rows)))

    def step() -> None:
        nonlocal now
        now += 0.01
        pulse.stepped(stepped, now, decoding=rows, tokens=rows)

    print(f"a step of {rows} rows: observed in {1e6 * median_s(step, 2000):.1f} us")


def tell_scrape(runtime: Runtime) -> None:
    metrics = Metrics(OneModel(runtime).entries)
    metrics.requests.observe(RECORD)
    whole = median_s(lambda: generate_latest(metrics), 50)
    longest = max(
        median_s(partial(generate_latest, FamilyCollector((one,))), 50) for one in metrics.collect()
    )
    size = len(generate_latest(metrics))
    print(
        f"a scrape of one model: {1e3 * whole:.2f} ms, {1e3 * longest:.2f} of it at once at most, "
        f"{size} bytes"
    )


def tell_end() -> None:
    metrics = Metrics(lambda: ())
    log, handler = logging.getLogger("trouper"), logging.StreamHandler(StringIO())
    handler.setFormatter(JsonLines())
    handler.addFilter(name_request)
    log.addHandler(handler)
    log.setLevel("INFO")
    log.propagate = False
    counted = median_s(partial(metrics.requests.observe, RECORD), 500)
    logged = median_s(partial(log_record, RECORD), 500)
    print(
        f"the end of a request: counted in {1e6 * counted:.0f} us, logged as JSON in "
        f"{1e6 * logged:.0f} us"
    )


def median_s(call: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.thread_time()
        call()
        taken.append(time.thread_time() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
