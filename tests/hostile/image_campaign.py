"""`python -m tests.hostile.image_campaign [--mutants N]`: hostile images for the model of
examples/shapes behind a real server, beside one running stream.

Good images first, for the pause that they cause and for the memory that they leave. Then mutants,
rare files and bombs, and a decoder that is killed while it decodes. Exits 1 if an answer was a 5xx
or did not name its part, the stream paused for `EXTRA_S` longer than beside good images or broke,
memory did not come back, or a kill cost more than one request.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import attrs
import psutil
import trio

from tests.abuse.asking import CHAT, Ask, Heard, ask, of
from tests.abuse.playing import EXTRA_S, Memory, server
from tests.abuse.streams import Streams, streams
from tests.hostile.images import (
    BOMBS,
    DECODED,
    OF_MUTANTS,
    RARE,
    ImageCase,
    good_files,
    mutants,
    of_size,
)
from trouper.engine.loading.model_source import SHAPES

CLIENTS = 4
GOOD, KILLS = 400, 20
PART = "messages.0.content.0"
STATUSES = {"image_crashes_decoder": 422}
KILLED = "image_decoder_unavailable"
BACK_S = 120.0
FLAGS = ("--cache-memory", "0", "--image-cache", "0", "--max-image-tokens", "64")
"""Nothing is kept, so that what stays is what was not given back. Images are decoded whole, and
made small for the model, whose time is not what is tried."""
Job = tuple[str, bytes, frozenset[str]]
"""Name, file, and the codes that it may get."""


def wish(data: bytes) -> Ask:
    url = f"data:image/png;base64,{b64encode(data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return Ask(of(messages=[{"role": "user", "content": content}], max_tokens=1), CHAT)


def fault_of(heard: Heard, codes: frozenset[str]) -> str:
    """What is wrong with an answer, if anything."""
    problem = heard.problem
    code = DECODED if heard.status == 200 else str(problem.get("code"))
    if code not in codes or (code and heard.status != STATUSES.get(code, 400)):
        return f"{heard.status} {code}"
    if code and (problem.get("param") != PART or PART not in problem["message"]):
        return f"{code} does not name its part"
    return ""


@attrs.define
class Campaign:
    port: int
    process: psutil.Process
    codes: Counter[str] = attrs.field(factory=Counter)
    wrong: list[str] = attrs.field(factory=list)
    sent: list[tuple[float, float, str]] = attrs.field(factory=list)
    """Begin, end and name of each request."""

    async def send(self, jobs: Iterable[Job], clients: int = CLIENTS) -> None:
        waiting = iter(jobs)

        async def client() -> None:
            for name, data, codes in waiting:
                began = time.monotonic()
                heard = await ask(self.port, wish(data))
                self.sent.append((began, time.monotonic(), name))
                self.codes[str(heard.problem.get("code", heard.status))] += 1
                if fault := fault_of(heard, codes):
                    self.wrong.append(f"{name}: {fault}")

        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(client)

    async def report(self, phase: str, running: Streams, limit_s: float) -> float:
        """Print what a phase did, note what was wrong, and return the longest pause."""
        (gap_s, ended_at), broken = await running.report()
        during = [
            name for begin, end, name in self.sent if begin < ended_at and end > ended_at - gap_s
        ]
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(self.codes.items()))
        megabytes = self.process.memory_info().rss / 1e6
        print(
            f"{phase}: {codes}; longest pause {gap_s:.2f} s, during {during[:6]}; process "
            f"{megabytes:.0f} MB",
            flush=True,
        )
        if gap_s > limit_s:
            self.wrong.append(f"{phase}: a pause of {gap_s:.2f} s")
        self.wrong += [f"{phase}: a stream broke: {end}" for end in broken]
        self.codes.clear()
        self.sent.clear()
        await running.hear()
        return gap_s

    @property
    def decoder(self) -> psutil.Process | None:
        for child in self.process.children():
            if "decoding_script" in " ".join(child.cmdline()):
                return child
        return None

    async def kill(self, number: int) -> None:
        """Stop the decoder, send three images, and end it: one of them fails, and is not to
        blame."""
        await ask(self.port, wish(of_size(64, 56, "png")))  # An earlier image may have ended it.
        decoder = self.decoder
        assert decoder is not None
        decoder.suspend()
        answers: list[Heard] = []

        async def client(seed: int) -> None:
            data = of_size(64, 64 + 3 * number + seed, "png")
            answers.append(await ask(self.port, wish(data)))

        async with trio.open_nursery() as nursery:
            for seed in range(3):
                nursery.start_soon(client, seed)
            await trio.sleep(0.5)
            decoder.kill()
        codes = Counter(str(heard.problem.get("code", heard.status)) for heard in answers)
        self.codes.update(codes)
        if codes != {"200": 2, KILLED: 1}:
            self.wrong.append(f"a decoder was killed: {dict(codes)}")


def good_jobs(count: int) -> Iterator[Job]:
    files = [data for variants in good_files().values() for data in variants]
    for number in range(count):
        # Rarely one of a screen's size, as the largest of the hostile ones are.
        large = number % 100 == 0
        data = of_size(1920, 1080 + number, "png") if large else files[number % len(files)]
        yield "good", data, frozenset({DECODED})


def jobs_of(cases: Sequence[ImageCase]) -> Iterator[Job]:
    for case in cases:
        yield case.name, case.data(), case.codes


async def play(campaign: Campaign, count: int) -> None:
    before: Memory
    async with streams(campaign.port, 1) as running:
        # Also the pools that a first large image makes.
        await campaign.send(good_jobs(GOOD // 4))
        await campaign.report("warm", running, float("inf"))
        await campaign.send(good_jobs(GOOD))
        limit_s = EXTRA_S + await campaign.report("good images", running, float("inf"))
        before = await Memory.of(campaign.port, campaign.process)
        began = time.monotonic()
        await campaign.send((name, data, OF_MUTANTS) for name, data in mutants(count))
        await campaign.report(f"{count} mutants", running, limit_s)
        print(f"in {time.monotonic() - began:.0f} s", flush=True)
        await campaign.send(jobs_of(RARE))
        await campaign.report("rare files", running, limit_s)
        await campaign.send(jobs_of(BOMBS), clients=2)
        await campaign.report("bombs", running, limit_s)
        for number in range(KILLS):
            await campaign.kill(number)
        await campaign.report(f"{KILLS} decoders killed", running, limit_s)
        memory = await Memory.back(campaign.port, campaign.process, before, BACK_S)
    print(
        f"process {memory.process / 1e6:.0f} MB, before {before.process / 1e6:.0f}; "
        f"MLX {memory.active / 1e6:.0f} MB, before {before.active / 1e6:.0f}"
    )
    if memory.exceeds(before):
        campaign.wrong.append(f"memory {memory}, before {before}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="just hostile-images", description=__doc__)
    parser.add_argument("--mutants", type=int, default=10_000)
    options = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the server ends, too.
    with server(SHAPES, *FLAGS) as (port, process):
        campaign = Campaign(port, process)
        trio.run(play, campaign, options.mutants)
        if not process.is_running():
            campaign.wrong.append("the server ended")
    print("\n".join(campaign.wrong[:50]) or "nobody was hurt")
    return bool(campaign.wrong)


if __name__ == "__main__":
    sys.exit(main())
