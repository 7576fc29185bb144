"""`python -m tests.storage N [FIRST]`: at least N faults in worlds from seed FIRST on. Fails at the
first wrong byte."""

# ruff: noqa: T201
from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.storage.worlds import campaign


def main(faults: int = 10_000, first: int = 0) -> None:
    began = time.perf_counter()
    with TemporaryDirectory() as directory:
        injected, counts, end = campaign(faults, Path(directory), first)
    took = time.perf_counter() - began
    print(f"{injected.total()} faults in {end - first} worlds, {took:.1f} s; 0 wrong bytes")
    for what in (injected, counts):
        print(", ".join(f"{count} {name}" for name, count in what.most_common()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
