"""`python -m tests.abuse [NAME ...]`: plays the abuses beside one running stream of the embedded
model, and a table of what they did.

With names, only those that have one of them in their name or kind; with `--tiny` as the first, on a
tiny random model. Honest requests of the same kind are played in turns with the abuses, since the
machine is not equally fast all the time: an abuse is measured against the worst of the honest turns
around it.
"""

# ruff: noqa: T201
from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import trio

from tests.abuse.asking import Ask, chat
from tests.abuse.listed import HONEST, Abuse, Kind, named
from tests.abuse.playing import (
    EXTRA_S,
    WITHIN,
    Memory,
    Played,
    Stage,
    faults,
    server,
    staged,
    tiny_model,
)

EVERY = 4
"""So many abuses between two turns of honest requests."""
MODEL_FLAGS = ("--cache-memory", "16MB")
"""Little is kept of prompts, so that what stays is what was not given back."""


@attrs.frozen
class Line:
    """One abuse, and what was wrong with what it did."""

    abuse: Abuse
    played: Played
    honest_s: float
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        verdict = "; ".join(self.wrong) or "ok"
        return (
            f"| {self.abuse.kind} | {self.abuse.name} | {self.played.statuses} | "
            f"{self.played.seconds:.1f} "
            f"| {self.played.gap_s:.2f} | {self.honest_s:.2f} | "
            f"{self.played.memory.process / 1e6:.0f} "
            f"| {self.played.memory.active / 1e6:.0f} | {verdict} |"
        )


def judged(abuse: Abuse, played: Played, honest_s: float, before: Memory) -> Line:
    wrong = list(dict.fromkeys(faults(abuse, played.heard)))
    if played.broken:
        wrong.append(f"the stream broke: {played.broken}")
    if played.gap_s > honest_s + EXTRA_S:
        wrong.append(f"a gap of {played.gap_s:.2f} s")
    for name, now, then in (
        ("the process", played.memory.process, before.process),
        ("MLX", played.memory.active, before.active),
    ):
        if now > then * WITHIN:
            wrong.append(f"memory of {name} {now / 1e6:.0f} MB, before {then / 1e6:.0f}")
    return Line(abuse, played, honest_s, tuple(wrong))


async def warm(stage: Stage, kinds: Collection[Kind]) -> Memory:
    """The memory after honest requests of each kind. The last has a body of 2 MB, after which the
    server gives back to the system what its heaps hold: else they would hide what an abuse leaves
    behind."""
    for asks in (HONEST[kind] for kind in kinds):
        await stage.play(asks)
    await stage.play([Ask(chat(user="x" * 2 * 10**6))])
    return (await stage.play(HONEST["body"])).memory


async def play_kind(stage: Stage, abuses: list[Abuse], kind: Kind, before: Memory) -> list[Line]:
    lines: list[Line] = []
    honest = await stage.play(HONEST[kind])
    for start in range(0, len(abuses), EVERY):
        turn = abuses[start : start + EVERY]
        played = [await stage.play(abuse.asks, before) for abuse in turn]
        after = await stage.play(HONEST[kind])
        honest_s = max(honest.gap_s, after.gap_s)
        honest = after
        for abuse, one in zip(turn, played, strict=True):
            lines.append(judged(abuse, one, honest_s, before))
            print(lines[-1], flush=True)
    return lines


async def play(abuses: tuple[Abuse, ...], model: Path | None) -> list[Line]:
    lines: list[Line] = []
    with server(model, *MODEL_FLAGS) as (port, process):
        async with staged(port, process) as stage:
            before = await warm(stage, {abuse.kind for abuse in abuses})
            print(
                f"before: process {before.process / 1e6:.0f} MB, MLX {before.active / 1e6:.0f} MB",
                flush=True,
            )
            print(
                "| kind | abuse | status | seconds | gap s | honest gap s | process MB | MLX MB | |"
            )
            print("|---|---|---|---|---|---|---|---|---|", flush=True)
            for kind, some in groupby(abuses, lambda abuse: abuse.kind):
                lines += await play_kind(stage, list(some), kind, before)
    return lines


def main() -> int:
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # Threads that spin and share their cores with the client are slower.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the server ends, too.
    names = sys.argv[1:]
    with TemporaryDirectory() as scratch:
        tiny = names[:1] == ["--tiny"]
        model = tiny_model(Path(scratch)) if tiny else None
        lines = trio.run(play, named(names[tiny:]), model)
    bad = [line for line in lines if line.wrong]
    print(f"{len(lines)} abuses, {len(bad)} of them hurt somebody")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
