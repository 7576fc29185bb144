"""Mixes at two ranks, which are processes: `python -m tests.drafts.ranks N [FIRST]`."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from tests.campaign import campaign
from tests.drafts.mixes import Mix
from tests.drafts.models import SPLIT, saved_to_split
from tests.ranks.launching import run_ranks


def play(directory: Path, name: str, seed: int) -> tuple[int, int]:
    """How many tokens were drafted, and how many of them were right. Raises as a mix at one rank
    does."""
    mix = Mix.of(name, seed)
    mix.drafted_by(saved_to_split(name, directory, mix.head), directory)
    answers = directory / "answers"
    answers.unlink(missing_ok=True)
    os.mkfifo(answers)
    (drafted, right), _ = run_ranks(2, "tests.drafts.one_rank", str(directory), name, str(seed))
    return drafted, right


def main(mixes: int = 60, first: int = 0) -> int:
    names = [*SPLIT]
    with TemporaryDirectory() as directory, patch.dict(os.environ, XDG_CACHE_HOME=directory):

        def outcomes_of(seed: int) -> Counter[str]:
            drafted, right = play(Path(directory), names[seed % len(names)], seed)
            return Counter({"tokens drafted": drafted, "of them right": right})

        return campaign("tests.drafts.ranks", outcomes_of, mixes, first, called="mixes", every=10)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
