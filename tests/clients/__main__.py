"""`just clients [NAME ...]`: install client libraries, run the loop of tool calls of each and
what asks for objects of classes, and write a table.

python -m tests.clients --family qwen3_5 openai litellm
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import attrs

from tests.clients.install import CLIENTS, version
from tests.clients.running import Outcome, run
from tests.replicas.scripted_servers import ROUTERS
from tests.scripted.families import FAMILIES


def report(client: str, family: str, outcome: Outcome) -> str:
    """One row of the table, and a line for each case that failed and each limit of the library."""
    loops = [case for case in outcome.cases if not case.of_objects]
    objects = [case for case in outcome.cases if case.of_objects]
    counts = " | ".join(
        f"{sum(case.ok for case in cases)} of {len(cases)}" if cases else ""
        for cases in (loops, objects)
    )
    row = f"| {client} | {version(client)} | {family} | {counts} | {len(outcome.refused)} |"
    notes = [
        f"{case.name}{', streamed' * case.streamed}: {case.detail}"
        for case in outcome.cases
        if not case.as_expected
    ]
    limits = Counter(case.limit for case in outcome.cases if case.limit)
    notes += [f"limit of the library, {count} cases: {limit}" for limit, count in limits.items()]
    notes += [f"refused: {refusal[:300]}" for refusal in outcome.refused]
    return "\n".join([row, *(f"<!-- {note} -->" for note in notes)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="just clients")
    parser.add_argument("clients", nargs="*", metavar="NAME", help=", ".join(CLIENTS))
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES))
    parser.add_argument("--router", choices=ROUTERS, default="", help="before two servers")
    parser.add_argument("--json", type=Path, help="write every case into this file")
    flags = parser.parse_args()
    if unknown := set(flags.clients) - set(CLIENTS):
        parser.error(
            f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}"
        )
    rows, failed = [], False
    print("| client | version | family | loops as expected | objects as sent | refused requests |")  # noqa: T201
    print("|---|---|---|---|---|---|")  # noqa: T201
    for client in flags.clients or CLIENTS:
        for family in flags.family or ["qwen3"]:
            outcome = run(client, family, flags.router)
            failed |= not outcome.cases or not all(case.as_expected for case in outcome.cases)
            rows.append({"family": family, "version": version(client), **attrs.asdict(outcome)})
            print(report(client, family, outcome), flush=True)  # noqa: T201
    if flags.json is not None:
        flags.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
