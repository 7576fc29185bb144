"""`python -m tests.house [--json] [--lower]`: figures of this checkout beside their targets."""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tests.house import ratchet
from tests.house.figures import format_table, measure

ROOT = Path(__file__).parent.parent.parent


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(prog="just house", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the figures alone")
    parser.add_argument("--lower", action="store_true", help="write fewer faults to ratchet.json")
    options = parser.parse_args(arguments)
    if options.lower:
        ratchet.write_ratchet(ratchet.lower(ratchet.measure_faults(root), ratchet.read_ratchet()))
    figures = measure(root)
    print(json.dumps(figures, indent=2) if options.json else format_table(figures))


if __name__ == "__main__":
    main()
