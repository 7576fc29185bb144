"""`python -m tests.drafts N [FIRST]`: so many mixes over the families, and how to play the one that failed again."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import tests.conftest  # noqa: F401 - the threads of BLAS, before MLX

# isort: split
import trio

from tests.campaign import campaign
from tests.drafts.mixes import play
from tests.drafts.models import DRAFTING


def main(mixes: int = 300, first: int = 0) -> int:
    with TemporaryDirectory() as directory:

        def outcomes_of(seed: int) -> Counter[str]:
            facts = trio.run(play, Path(directory), DRAFTING[seed % len(DRAFTING)], seed)
            counts = Counter({"tokens drafted": facts.drafted, "of them right": facts.accepted})
            for name, stats in facts.by_proposer.items():
                counts += Counter({f"by {name}": stats.drafted, f"by {name} right": stats.accepted})
            return counts

        return campaign("tests.drafts", outcomes_of, mixes, first, called="mixes", every=10)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
