"""`python -m tests.drafts N [FIRST]`: so many mixes over the families, and how to play the one that failed again."""

# ruff: noqa: T201
from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

import tests.conftest  # noqa: F401 - the threads of BLAS, before MLX

# isort: split
import trio

from tests.drafts.mixes import play
from tests.drafts.models import DRAFTING, saved


def main(mixes: int = 300, first: int = 0) -> int:
    began, failed, drafted, accepted = time.perf_counter(), list[int](), 0, 0
    with TemporaryDirectory() as directory:
        for seed in range(first, first + mixes):
            name = DRAFTING[seed % len(DRAFTING)]
            try:
                facts = trio.run(play, saved(name, Path(directory)), name, seed)
            except Exception:  # noqa: BLE001  A mix may fail in any way; the others still count.
                failed.append(seed)
                print(f"\n{name}, seed {seed}\n{traceback.format_exc()}", file=sys.stderr)
            else:
                drafted, accepted = drafted + facts.drafted, accepted + facts.accepted
            if (seed - first + 1) % 10 == 0 or seed == first + mixes - 1:
                took = time.perf_counter() - began
                said = f"{accepted} of {drafted} drafted tokens were right"
                print(f"{seed - first + 1} of {mixes} mixes, {len(failed)} failed, {said}, {took:.0f} s", flush=True)
    for seed in failed:
        print(f"failed: seed {seed}; again: python -m tests.drafts 1 {seed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
