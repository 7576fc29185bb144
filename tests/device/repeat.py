"""`just repeat-device FAMILY TIMES`: a family's exactness tests in fresh processes, again and
again.

What depends on the state of MLX's buffer cache, on addresses or on timing shows in some processes
and not in others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed

import click

TESTS = "tests/engine/test_exactness.py"
EVERY = {**os.environ, "TROUPER_EVERY_FAMILY": "1"}
QUIET = ("-q", "-p", "no:benchmark", "-p", "no:cacheprovider", "-p", "no:xdist")


def ids(family: str) -> list[str]:
    """The tests of this family, by name."""
    command = [sys.executable, "-m", "pytest", *QUIET, "--collect-only", TESTS]
    listed = subprocess.run(
        command, env=EVERY, capture_output=True, text=True, check=True
    ).stdout.split()
    return [test for test in listed if family in test.partition("[")[2].rstrip("]").split("-")]


def play(tests: list[str]) -> str:
    """One process; "" if every test passed, else the lines that say what failed."""
    command = [sys.executable, "-m", "pytest", *QUIET, "-rf", *tests]
    done = subprocess.run(command, env=EVERY, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (
        "" if done.returncode == 0 else "\n".join(failed) or done.stdout[-500:] + done.stderr[-500:]
    )


@click.command()
@click.argument("family")
@click.argument("times", type=int, default=100)
@click.option(
    "--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="Processes at a time."
)
def main(family: str, times: int, jobs: int) -> None:
    """Run FAMILY's exactness tests TIMES times, each in a process of its own. Ctrl-C ends it and
    tells what came of those that ran."""
    tests = ids(family)
    if not tests:
        raise click.UsageError(f"no test in {TESTS} is about {family}")
    results = Counter[str]()
    with ThreadPoolExecutor(jobs) as pool, click.progressbar(length=times, file=sys.stderr) as bar:
        try:
            for done in as_completed([pool.submit(play, tests) for _ in range(times)]):
                results[done.result()] += 1
                bar.update(1)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
    played = results.total()
    click.echo(
        f"{family}: {results.pop('', 0)} of {played} processes passed all of their {len(tests)} "
        "tests"
    )
    for text, count in results.most_common(5):
        click.echo(f"{count} times:\n{text}")
    sys.exit(bool(results))


if __name__ == "__main__":
    main()
