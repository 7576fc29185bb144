"""`python -m tests.soak HOURS [--out DIRECTORY] [--seed N]`: mixed load of every endpoint on real
servers, judged by slopes.

Three servers stay up all the time, and are loaded in turns: one with keys, the embedded model and
two small ones, of which one at a time fits beside it; then a group of two ranks together with a
server whose model has LoRA adapters. Prints each series' slope and ends with 1 if one of them grows
(or the hit rate falls), an answer was wrong, or a request met an error.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import attrs
import trio
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.soak.judging import Report, judge
from tests.soak.load import Load, Tally, Target
from tests.soak.page import page
from tests.soak.sampling import Sampler
from tests.soak.servers import (
    ADAPTED,
    LARGE,
    MODEL_MEMORY,
    OTHER,
    SEES,
    SMALL,
    SPLIT,
    SSD_BYTES,
    Group,
    Models,
    group,
)
from tests.soak.wishes import Question, questions


@attrs.frozen
class Shape:
    """How a soak is played. A cycle has a turn of each server. `churn`: the small model changes
    after so many cycles. `fewest`: so many answers are compared, however long that takes."""

    seconds: float
    one_rank_s: float = 90.0
    ranks_s: float = 45.0
    clients: int = 3
    pause_s: float = 1.0
    prompts: int = 8
    churn: int = 6
    sample_s: float = 5.0
    fewest: int = 0
    tiny: bool = False
    seed: int = 0

    @property
    def cycle_s(self) -> float:
        return self.one_rank_s + self.ranks_s


@attrs.frozen
class Soaked:
    report: Report
    tally: Tally
    windows: int


Watch = Callable[[float, str], None]
"""Is told the part that is done, and a word on it."""


def references(
    models: Models, place: Path, shape: Shape, watch: Watch
) -> dict[str, list[Question]]:
    """By model, from servers that keep nothing, one after another."""
    known: dict[str, list[Question]] = {}
    for server, flags, names in (
        ("quiet", models.flags(**{SPLIT: models.split}), (LARGE, SMALL, OTHER, SEES, SPLIT)),
        ("quiet-tuned", models.tuned_flags(), ADAPTED),
    ):
        with group(server, place, flags, quiet=True) as served:
            for name in names:
                watch(0.0, f"known answers of {name}")
                described = models.described(name)
                known[name] = trio.run(
                    questions, served.port, described, shape.prompts, Random(shape.seed)
                )
    return known


async def play(
    groups: Sequence[Group], known: dict[str, list[Question]], shape: Shape, out: Path, watch: Watch
) -> Soaked:
    """`groups`: one rank, the ranks, and the one with adapters. The page and the verdict so far are
    written after each cycle, so that they can be looked at."""
    began, tally = time.monotonic(), Tally()
    single, ranks, tuned = groups

    def now() -> float:
        return time.monotonic() - began

    load = Load(tally, Random(shape.seed), now, shape.pause_s)
    everything = [question for name in (LARGE, SMALL, OTHER, SEES) for question in known[name]]
    adapted = [question for name in ADAPTED for question in known[name]]
    one = Target(single.port, everything, watched=True, keyed=True)
    several = [Target(ranks.port, known[SPLIT]), Target(tuned.port, adapted)]
    cycle = 0
    with (out / "samples.jsonl").open("w") as sink:
        sampler = Sampler(groups, now, sink)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sampler.run, shape.sample_s)
            while now() < shape.seconds or tally.checked < shape.fewest:
                watch(
                    now() / shape.seconds,
                    f"{tally.checked} answers, {len(tally.wrong)} wrong, {len(tally.errors)} "
                    "errors",
                )
                small = (SMALL, OTHER)[cycle // shape.churn % 2]
                # A turn ends when the clients have read what they asked for; the next cycle begins
                # at its own time all the same.
                await load.run(
                    [one.of((LARGE, small, SEES), small)],
                    shape.clients,
                    (cycle * shape.cycle_s + shape.one_rank_s) - now(),
                )
                cycle += 1
                await load.run(several, shape.clients, cycle * shape.cycle_s - now())
                soaked = Soaked(judge(sampler.samples, tally, shape.cycle_s), tally, cycle)
                _write(soaked, shape, out)
            nursery.cancel_scope.cancel()
    return soaked


def _write(soaked: Soaked, shape: Shape, out: Path) -> None:
    facts = {
        "machine": (
            f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        ),
        "played": f"{soaked.windows} cycles of {shape.cycle_s:.0f} s (one rank "
        f"{shape.one_rank_s:.0f} s, two ranks "
        f"and adapters {shape.ranks_s:.0f} s), {shape.clients} clients with pauses of "
        f"{shape.pause_s:g} s, seed {shape.seed}",
        "bounds": (
            f"cached blocks 40 MB for each model, SSD tier {SSD_BYTES / 1e6:.0f} MB, 20 stored "
            "responses"
        ),
    }
    text = page(soaked.report, soaked.tally, facts)
    (out / "verdict.txt").write_text("\n".join(_verdict(soaked)) + "\n", encoding="utf-8")
    (out / "soak.html.new").write_text(text, encoding="utf-8")
    (out / "soak.html.new").replace(out / "soak.html")


def _verdict(soaked: Soaked) -> Iterator[str]:
    tally = soaked.tally
    yield from map(str, soaked.report.judged)
    yield from soaked.report.faults
    yield (
        f"{tally.checked} answers compared, {len(tally.wrong)} wrong, {len(tally.errors)} errors; "
        f"{soaked.windows} cycles"
    )
    yield (
        "FAILED" if soaked.report.failed else "held" if soaked.report.told else "too short to tell"
    )


def soak(shape: Shape, out: Path, watch: Watch) -> Soaked:
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        place = Path(scratch)
        models = Models.saved(place, tiny=shape.tiny)
        known = references(models, place, shape, watch)
        room = () if shape.tiny else ("--model-memory", str(MODEL_MEMORY))
        single = stack.enter_context(group("one", place, [*models.flags(), *room]))
        ranks = stack.enter_context(group("ranks", place, models.split_flags(), ranks=2))
        tuned = stack.enter_context(group("tuned", place, models.tuned_flags()))
        try:
            return trio.run(play, (single, ranks, tuned), known, shape, out, watch)
        finally:
            for each in (single, ranks, tuned):
                (out / f"{each.name}.log").write_bytes((each.place / "log").read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(prog="just soak", description=__doc__)
    parser.add_argument("hours", type=float)
    parser.add_argument("--out", type=Path, default=Path("soak-out"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # So that the servers end, too: Trio knows what to do with it.
    shape = Shape(arguments.hours * 3600, seed=arguments.seed)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not sys.stdout.isatty()) as bars:
        task = bars.add_task("servers start", total=1.0)

        def watch(part: float, text: str) -> None:
            bars.update(task, completed=part, description=text)
            if bars.disable:
                print(f"{100 * part:5.1f} %: {text}", flush=True)

        soaked = soak(shape, arguments.out, watch)
    print(*_verdict(soaked), f"{arguments.out}/soak.html", sep="\n", flush=True)
    return int(soaked.report.failed)


if __name__ == "__main__":
    sys.exit(main())
