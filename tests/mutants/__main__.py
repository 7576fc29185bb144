"""`python -m tests.mutants [PATTERN ...]`: play the mutants whose name or file matches one of the
patterns; all without one.

Exits 1 if less than 97 % are killed, 2 if an entry is stale or the tests fail without any mutant.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.mutants.catalogue import ROOT, Mutant, faults, load
from tests.mutants.playing import LIMIT_S, Outcome, Results, Scratch

LEAST = 0.97
CACHE = ROOT / ".mutants" / "results.json"
BASELINE_LIMIT_S = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    chosen = [mutant for mutant in load() if any(map(mutant.matches, options.patterns or ["*"]))]
    if not chosen:
        print(f"no mutant is called {' or '.join(options.patterns)}")
        return 2
    if wrong := [fault for mutant in chosen for fault in faults(mutant)]:
        print("\n".join(wrong))
        return 2
    played = [mutant for mutant in chosen if not mutant.equivalent]
    results = Results(CACHE)
    keys = {mutant: results.key(mutant) for mutant in played}
    known = (
        {}
        if options.fresh
        else {mutant: found for mutant, key in keys.items() if (found := results.find(key))}
    )
    todo = [mutant for mutant in played if mutant not in known]
    if todo and not options.no_baseline and not _baseline(todo):
        return 2
    began = time.perf_counter()
    outcomes = known | _play(
        todo,
        options.workers,
        options.limit_s,
        lambda mutant, outcome: results.note(keys[mutant], outcome),
    )
    took = time.perf_counter() - began
    return _summary(
        chosen,
        outcomes,
        f"{len(todo)} played in {took:.0f} s, {len(known)} known from earlier runs",
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="just mutants", description=__doc__)
    parser.add_argument(
        "patterns", nargs="*", metavar="PATTERN", help="of names or files, as in 'engine/sampler*'"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument(
        "--fresh", action="store_true", help="play also what is known from earlier runs"
    )
    parser.add_argument(
        "--no-baseline",
        action="store_true",
        help="take for granted that the tests pass without a mutant",
    )
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="for the tests of one mutant"
    )
    return parser.parse_args(arguments)


def _baseline(mutants: Sequence[Mutant]) -> bool:
    """Tests that fail anyway would kill every mutant."""
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    print(f"without a mutant: {len(tests)} selections of tests", flush=True)
    with Scratch() as scratch:
        outcome = scratch.run([*tests], limit_s=BASELINE_LIMIT_S)
    if outcome.fate != "survived":
        print(f"{outcome.said}\nthese tests fail without any mutant")
    return outcome.fate == "survived"


def _play(
    mutants: Sequence[Mutant], workers: int, limit_s: float, note: Callable[[Mutant, Outcome], None]
) -> dict[Mutant, Outcome]:
    todo, done = SimpleQueue[Mutant](), SimpleQueue[tuple[Mutant, Outcome | Exception]]()
    for mutant in mutants:
        todo.put(mutant)

    def work() -> None:
        with Scratch() as scratch:
            while True:
                try:
                    mutant = todo.get_nowait()
                except Empty:
                    return
                try:
                    done.put((mutant, scratch.play(mutant, limit_s)))
                except Exception as error:  # noqa: BLE001  Of whatever kind: whoever waits must hear of it.
                    done.put((mutant, error))

    for _ in range(min(workers, len(mutants))):
        threading.Thread(target=work, daemon=True).start()
    outcomes: dict[Mutant, Outcome] = {}
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("", total=len(mutants))
        for _ in mutants:
            mutant, outcome = done.get()
            if isinstance(outcome, Exception):
                raise outcome
            outcomes[mutant] = outcome
            note(mutant, outcome)
            progress.console.print(
                f"{outcome.fate:>9}  {mutant.name}", highlight=False, markup=False
            )
            progress.update(task, advance=1, description=mutant.name)
    return outcomes


def _summary(chosen: Sequence[Mutant], outcomes: dict[Mutant, Outcome], how: str) -> int:
    for mutant, outcome in outcomes.items():
        if not outcome.killed:
            print(
                f"\n{outcome.fate}: {mutant.name}: {mutant.breaks}\n  tests: "
                f"{' '.join(mutant.tests)}\n{outcome.said}"
            )
    print()
    for mutant in chosen:
        if mutant.equivalent:
            print(f"equivalent: {mutant.name}: {mutant.equivalent}")
    killed = sum(outcome.killed for outcome in outcomes.values())
    hung = sum(outcome.fate == "timed out" for outcome in outcomes.values())
    share = killed / len(outcomes) if outcomes else 1.0
    print(
        f"{killed} of {len(outcomes)} killed ({share:.1%}; {hung} of them by the time limit), "
        f"{len(chosen) - len(outcomes)} equivalent; {how}"
    )
    return int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
