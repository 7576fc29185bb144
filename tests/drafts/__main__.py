"""`python -m tests.drafts N [FIRST]`: so many mixes over the families, and how to play the one that
failed again.

A campaign of 100 mixes or more fails, too, if something that mixes are made of never happened in
it.
"""

# ruff: noqa: T201
from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import tests.conftest  # noqa: F401 - the threads of BLAS, before MLX

# isort: split
import trio

from tests.campaign import campaign
from tests.drafts.mixes import Mix, Played, play
from tests.drafts.models import DRAFTING, HYBRIDS
from tests.tapped import KINDS

ENOUGH = 100
"""Mixes that have everything at least once."""
EVERYTHING = (
    *(
        "drafted",
        "right",
        "preempted",
        "prompt tokens from the cache",
        "thinking limits",
        "grammars",
        "stop strings",
        "penalties",
    ),
    *(
        f"{kind} {name}"
        for kind in ("drafted by", "right by")
        for name in ("ngram", "draft_model", "mtp")
    ),
    *("greedy", "seeded", "mixes of hybrids", "mixes with a wrong oracle", "mixes with 8-bit KV"),
    "mixes with a short draft model",
    *(f"mixes with the draft model {kind}" for kind in KINDS),
)


def counted(mix: Mix, played: Played) -> Counter[str]:
    """What was in a mix."""
    facts, drafts = played.facts, played.facts.speculation
    wishes = [played.wanted.asked[name] for name, _ in played.heard if name in played.wanted.asked]
    counts = Counter(
        {
            "drafted": drafts.drafted,
            "right": drafts.accepted,
            "preempted": facts.preemptions,
            "prompt tokens from the cache": facts.total_cached_tokens,
            "requests": len(played.heard),
            "thinking limits": sum(wish.thinking_token_budget is not None for wish in wishes),
            "grammars": sum(wish.grammar is not None for wish in wishes),
            "stop strings": sum(bool(wish.stop) for wish in wishes),
            "penalties": sum("penalt" in wish.request_id for wish in wishes),
            "greedy": sum(wish.sampling.temperature == 0 for wish in wishes),
            "seeded": sum(wish.sampling.temperature > 0 for wish in wishes),
            "mixes of hybrids": mix.name in HYBRIDS,
            "mixes with a wrong oracle": mix.oracle == "always",
            "mixes with a short draft model": mix.draft == "short",
            f"mixes with the draft model {mix.draft}": bool(mix.draft),
            "mixes with 8-bit KV": mix.settings["kv_bits"] == 8,
            f"mixes of {mix.name}": 1,
        }
    )
    for name, stats in drafts.by_proposer.items():
        counts += Counter({f"drafted by {name}": stats.drafted, f"right by {name}": stats.accepted})
    return +counts


def main(mixes: int = 300, first: int = 0) -> int:
    seen: Counter[str] = Counter()
    with TemporaryDirectory() as directory, patch.dict(os.environ, XDG_CACHE_HOME=directory):

        def outcomes_of(seed: int) -> Counter[str]:
            mix = Mix.of(DRAFTING[seed % len(DRAFTING)], seed)
            counts = counted(mix, trio.run(play, Path(directory), mix))
            seen.update(counts)
            return counts

        failed = campaign("tests.drafts", outcomes_of, mixes, first, called="mixes", every=10)
    missing = [what for what in EVERYTHING if not seen[what]] if mixes >= ENOUGH else []
    if missing:
        print(f"in no mix: {', '.join(missing)}")
    return int(failed or bool(missing))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
