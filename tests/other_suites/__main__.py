"""`just other-suites [NAME ...]`: tests of other servers and clients, of pinned versions from their
registries, against `trouper serve` with layers of the embedded model, and a table.

python -m tests.other_suites vllm --only '*test_basic.py::*'
TROUPER_SUITES=checkouts python -m tests.other_suites: as in checkouts/vllm, checkouts/sglang
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import attrs

from tests.other_suites.running import Outcome, run
from tests.other_suites.suites import read_suites

HEADER = """\
| suite | version | files | tests | passed | failed | skip themselves | not portable |
|---|---|---|---|---|---|---|---|"""


def report(outcome: Outcome) -> str:
    """One row of the table."""
    passed, failed, skipped, left_out = (
        len(outcome.tests_that(name)) for name in ("passed", "failed", "skipped", "left out")
    )
    of = len(outcome.files) + outcome.files_left_out.total()
    cells = (
        outcome.title,
        outcome.version,
        f"{len(outcome.files)} of {of}",
        len(outcome.tests),
        passed,
        f"**{failed}**" if failed else 0,
        skipped,
        left_out,
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def explain(outcome: Outcome) -> str:
    """Why tests and files are left out, with their numbers, and each test that failed."""
    lines = [f"\n{outcome.title}, not portable:"]
    reasons = Counter(test.reason for test in outcome.tests_that("left out"))
    lines += [f"- {count}: {why}" for why, count in reasons.most_common()]
    files = outcome.files_left_out.most_common()
    lines += [f"- {count} files that are not collected: {why}" for why, count in files]
    for test in outcome.tests_that("failed"):
        lines.append(f"\nfailed: {test.name}\n{test.reason}")
    lines += [f"neither collected nor left out: {path}" for path in outcome.unlisted]
    lines += [f"a pattern that names nothing: {pattern}" for pattern in outcome.idle]
    if outcome.problem:
        lines.append(outcome.problem)
    return "\n".join(lines)


def main() -> int:
    suites = read_suites()
    parser = argparse.ArgumentParser(prog="just other-suites")
    parser.add_argument("suites", nargs="*", metavar="NAME", help=", ".join(suites))
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="tests that run, also such as are left out: 'test_basic.py::*'",
    )
    parser.add_argument("--json", type=Path, help="write every test into this file")
    flags = parser.parse_args()
    if unknown := set(flags.suites) - set(suites):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; there are {', '.join(suites)}")
    outcomes = []
    print(HEADER)  # noqa: T201
    for name in flags.suites or suites:
        outcomes.append(run(name, suites[name], flags.only))
        print(report(outcomes[-1]), flush=True)  # noqa: T201
    for outcome in outcomes:
        print(explain(outcome))  # noqa: T201
    if flags.json is not None:
        data = [attrs.asdict(outcome) for outcome in outcomes]
        flags.json.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    return int(not all(outcome.is_right for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
