"""One model is loaded, unloaded, put to sleep and woken again and again, while another one streams:
what memory does, and the streams' longest gap. Through the model manager and real engines, without
HTTP."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import attrs
import mlx.core as mx
import trio

from tests.families import save
from tests.soak.slopes import Slope, theil_sen
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
from trouper.actors.runtime.served_models import Operation
from trouper.system import heap

STREAMS = 2
QUIET_STREAMS = 10
"""Streams before the first cycle."""
TOKENS = 200
IDLE_AT_MOST_S = 1.0
"""Between two cycles nothing happens for as long as a cycle took, at most so long."""


@attrs.define
class Seen:
    """What was measured."""

    resident_bytes: list[int] = attrs.field(factory=list)
    """After each cycle."""
    active_bytes: list[int] = attrs.field(factory=list)
    gaps_ms: Counter[int] = attrs.field(factory=Counter)
    """Pauses between two tokens of the other model's streams while models come and go, in whole
    milliseconds: a list of all would grow like what is looked for."""
    quiet_gaps_ms: Counter[int] = attrs.field(factory=Counter)
    """The same before that, and between two cycles, while no model comes or goes: what the machine
    does anyway."""
    busy_gaps_ms: Counter[int] = attrs.field(factory=Counter)
    """The pauses while models come and go, each at most as long as the CPU time that the process
    took meanwhile: where others want the cores, too, the rest is waiting for one."""
    churning: bool = False
    streams: int = 0
    answers: int = 0
    """Requests of the model that comes and goes, each with all its tokens."""
    lost: int = 0

    def note_gap(self, gap_s: float, cpu_s: float) -> None:
        """`cpu_s`: CPU time of the process meanwhile, of all its threads."""
        (self.gaps_ms if self.churning else self.quiet_gaps_ms)[int(gap_s * 1e3)] += 1
        if self.churning:
            self.busy_gaps_ms[int(min(gap_s, cpu_s) * 1e3)] += 1

    def slope(self, warm: int, level: float = 0.95) -> Slope:
        """Bytes of resident memory for each cycle after the first `warm`."""
        return theil_sen([*enumerate(self.resident_bytes[warm:])], level)


def settled_bytes() -> int:
    """Resident memory without what is kept for a while only: garbage, and CPython's cache of
    attributes of types, whose 4,096 entries each hold a name, so that models would fill it up with
    new ones for a thousand loads."""
    gc.collect()
    if (
        clear := getattr(sys, "_clear_internal_caches", None)
        or getattr(sys, "_clear_type_cache", None)
    ) is not None:
        clear()
    return heap.resident_bytes()


def nothing(gap_s: float, cpu_s: float) -> None:
    """Nobody looks."""


async def tokens(
    runtime: Runtime, count: int, gap: Callable[[float, float], None] = nothing
) -> int:
    wish = Generate(
        request_id="a",
        prompt=TokenPrompt((1, 28, 30, 34, 40)),
        max_tokens=count,
        ignore_eos=True,
        sampling=Sampling(temperature=0),
    )
    got, last, before_s = 0, 0.0, 0.0
    with await runtime.submit(wish) as answer:
        async for delta in answer:
            now, cpu_s = trio.current_time(), time.process_time()
            if got:
                gap(now - last, cpu_s - before_s)
            got, last, before_s = got + len(delta.tokens), now, cpu_s
    return got


async def stream(manager: ModelManager, name: str, seen: Seen) -> None:
    """A client of the other model, until cancelled."""
    while True:
        lease = await manager.lease(name)
        try:
            got = await tokens(lease.runtime, TOKENS, seen.note_gap)
        finally:
            lease.release()
        seen.streams += 1
        seen.lost += got != TOKENS


async def succeeded(operation: Operation) -> None:
    await operation.done.wait()
    assert operation.problem is None, operation.problem


async def cycle(manager: ModelManager, name: str, seen: Seen) -> None:
    for sleeps in (False, True):
        await succeeded(manager.control.load(name))
        lease = await manager.lease(name)
        got = await tokens(lease.runtime, 8)
        lease.release()
        seen.answers += got == 8
        seen.lost += got != 8
        await succeeded(manager.control.unload(name, sleep=sleeps))


async def run_cycles(
    directory: Path, count: int, report: Callable[[int, Seen], None] = lambda *_: None
) -> Seen:
    """`count` cycles: load, unload, load (of what was unloaded), sleep; each next load wakes it."""
    models = [str(save(family, directory / family)) for family in ("llama", "qwen3")]
    settings = [Settings(model=model, ssd_cache_dir=directory / "cache") for model in models]
    seen = Seen()
    async with trio.open_nursery() as nursery:
        manager: ModelManager = await nursery.start(run_models, settings, ServerSettings())
        # It announces itself to requests only
        while manager.entries()[1].state != "ready":  # noqa: ASYNC110
            await trio.sleep(0.01)
        await succeeded(manager.control.unload(models[1]))
        gc.collect()
        gc.freeze()  # As the server does once it has started.
        async with trio.open_nursery() as clients:
            for _ in range(STREAMS):
                clients.start_soon(stream, manager, models[0], seen)
            while seen.streams < QUIET_STREAMS:  # noqa: ASYNC110 - streams end without a word
                await trio.sleep(0.01)
            for index in range(count):
                seen.churning, began = True, trio.current_time()
                await cycle(manager, models[1], seen)
                seen.churning = False
                await trio.sleep(min(IDLE_AT_MOST_S, trio.current_time() - began))
                seen.resident_bytes.append(settled_bytes())
                seen.active_bytes.append(mx.get_active_memory())
                report(index, seen)
            clients.cancel_scope.cancel()
        assert await manager.drain(10)
    gc.unfreeze()
    return seen
