"""`python -m tests.abuse.siege [--tiny] [--streams N] [--descriptors N] [--memory-mb N]`: all
abuses at once, and hostile model directories and adapters, beside several streams.

First large requests are served, and for each abuse an honest request of its kind is sent, for the
longest pause that such a load causes. Memory before is what these leave: libraries that are
imported at their first use, and what glibc keeps of each thread's heap. Then all requests of the
abuses are sent, then every hostile directory is asked for and every hostile adapter is loaded.
Exits 1 if a stream paused for `EXTRA_S` longer than beside honest clients or broke, memory did not
come back, the server ended, or an answer was no clear error.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import psutil
import trio

from tests.abuse.__main__ import MODEL_FLAGS
from tests.abuse.asking import CHAT, Ask, Heard, ask, of
from tests.abuse.listed import HONEST, Abuse, named
from tests.abuse.playing import EXTRA_S, WITHIN, Memory, faults, server, tiny_model
from tests.abuse.streams import Streams, streams
from tests.hostile.directories import Case, build, remove
from trouper.protocol.problems import INTERNAL

CLIENTS = 6
ASKS, ROUNDS = 8, 2
"""Requests of one abuse at most, of which some have hundreds, and rounds of all requests."""
LARGE = ("15 MB in user", "12 MB of escapes in user", "a schema of 2,000 properties")
"""Abuses that an honest client could send."""
BACK_S = 120.0
SHORTAGE = ("system_shortage", "too_many_connections", "request_memory_full", "queue_full")
"""Codes with which a server under limits may refuse anything."""
FLAGS = (*MODEL_FLAGS, "--grammar-timeout-s", "2")
"""Grammars of one client are compiled one by one, and some forty of the abuses are slow."""


@attrs.define
class Siege:
    """One server and what was wrong."""

    port: int
    process: psutil.Process
    limited: bool
    statuses: Counter[int] = attrs.field(factory=Counter)
    wrong: list[str] = attrs.field(factory=list)
    sent: list[tuple[float, float, str]] = attrs.field(factory=list)
    """Begin, end and name of each request."""

    async def send(self, jobs: Sequence[tuple[Abuse, Ask]]) -> None:
        """Send all, with `CLIENTS` at a time."""
        waiting = iter(jobs)

        async def client() -> None:
            for abuse, wish in waiting:
                began = time.monotonic()
                self.judge(abuse, wish, await ask(self.port, wish))
                self.sent.append((began, time.monotonic(), abuse.name))

        async with trio.open_nursery() as nursery:
            for _ in range(CLIENTS):
                nursery.start_soon(client)

    def judge(self, abuse: Abuse, wish: Ask, heard: Heard) -> None:
        self.statuses[heard.status] += 1
        if self.limited and heard.problem.get("code") in SHORTAGE:
            return
        one = attrs.evolve(abuse, asks=(wish,))
        self.wrong += [f"{abuse.name}: {fault}" for fault in faults(one, [heard])]

    async def honest(self, running: Streams, asks: Sequence[Ask]) -> float:
        """Return the longest pause beside honest requests, with `CLIENTS` at a time."""
        waiting = iter(asks)

        async def client() -> None:
            for wish in waiting:
                await ask(self.port, wish)

        await running.hear()
        async with trio.open_nursery() as nursery:
            for _ in range(CLIENTS):
                nursery.start_soon(client)
        longest, _ = await running.report()
        return longest.seconds

    async def load(self, case: Case) -> None:
        """Ask for a hostile directory, or load a hostile adapter: an error, or it is served."""
        if case.kind == "adapter":
            wish = Ask(of(lora_name=case.name, lora_path=str(case.path)), "/v1/load_lora_adapter")
        else:
            messages = [{"role": "user", "content": "a"}]
            wish = Ask(of(model=str(case.path), messages=messages, max_tokens=1), CHAT)
        heard = await ask(self.port, wish)
        self.statuses[heard.status] += 1
        has_message = heard.status < 300 or bool(heard.problem.get("message"))
        if heard.status in (0, INTERNAL.status) or not has_message:
            self.wrong.append(f"{case.name}: {heard.status} {heard.body[:200]!r}")

    async def end(self, phase: str, running: Streams, honest_s: float, before: Memory) -> None:
        """Print what a phase did, and note what was wrong."""
        (gap_s, ended_at), broken = await running.report()
        during = [
            name for begin, end, name in self.sent if begin < ended_at and end > ended_at - gap_s
        ]
        memory = await Memory.back(self.port, self.process, before, BACK_S)
        answers = dict(sorted(self.statuses.items()))
        print(
            f"{phase}: longest pause {gap_s:.2f} s, beside honest clients {honest_s:.2f}; process "
            f"{memory.process / 1e6:.0f} MB, before {before.process / 1e6:.0f}; answers {answers}; "
            f"the pause was during {during}",
            flush=True,
        )
        if gap_s > honest_s + EXTRA_S:
            self.wrong.append(f"{phase}: a pause of {gap_s:.2f} s")
        if memory.exceeds(before):
            self.wrong.append(f"{phase}: memory {memory}, before {before}, may be {WITHIN} of it")
        self.wrong += [f"{phase}: a stream broke: {what}" for what in broken]
        self.statuses.clear()


async def play(siege: Siege, count: int, cases: Sequence[Case]) -> None:
    jobs = ROUNDS * [(abuse, wish) for abuse in named([]) for wish in abuse.asks[:ASKS]]
    large = 2 * CLIENTS * [(abuse, wish) for abuse in named(LARGE) for wish in abuse.asks]
    honest = [HONEST[abuse.kind][0] for abuse, _ in jobs]
    async with streams(siege.port, count) as running:
        await siege.send(large)
        honest_s = await siege.honest(running, honest)
        before = await Memory.of(siege.port, siege.process)
        await siege.send(jobs)
        await siege.end(f"{len(jobs)} requests", running, honest_s, before)
        await running.hear()
        for case in cases:
            await siege.load(case)
        await siege.end(f"{len(cases)} directories and adapters", running, honest_s, before)


def main() -> int:
    parser = argparse.ArgumentParser(prog="just siege", description=__doc__)
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny random model in place of the embedded one"
    )
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--descriptors", type=int, help="limit of the server's descriptors")
    parser.add_argument(
        "--memory-mb", type=int, help="what the server may map beyond what it has when ready"
    )
    options = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the server ends, too.
    if options.descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.descriptors, options.descriptors))
    with TemporaryDirectory() as scratch:
        root = Path(scratch)
        tiny = tiny_model(root / "tiny")
        cases = build(root / "hostile", tiny)
        flags = ("--models-from", str(root / "hostile"), "--adapters-from", str(root / "hostile"))
        try:
            with server(tiny if options.tiny else None, *FLAGS, *flags) as (port, process):
                if options.memory_mb:
                    bound = process.memory_info().vms + options.memory_mb * 2**20
                    process.rlimit(psutil.RLIMIT_AS, (bound, bound))
                siege = Siege(
                    port,
                    process,
                    limited=bool(options.descriptors or options.memory_mb),
                )
                trio.run(play, siege, options.streams, cases)
                if not process.is_running():
                    siege.wrong.append("the server ended")
        finally:
            remove(root / "hostile")
    print("\n".join(siege.wrong) or "nobody was hurt")
    return bool(siege.wrong)


if __name__ == "__main__":
    sys.exit(main())
