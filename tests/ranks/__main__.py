"""Greedy tokens of every family at one, two and three ranks, with drafts, and with 8-bit KV: `just ranks-parity 512`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.ranks.launching import run_ranks
from tests.ranks.models import CONFIGS
from tests.ranks.playing import play_all
from tests.ranks.test_parity import KEPT_IN_BYTES, saved, tokens
from trouper.engine.group import ALONE


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    differ = 0
    with tempfile.TemporaryDirectory() as directory:
        plain = saved(Path(directory), {name: {"greedy": count, "drafts": True} for name in CONFIGS})
        spec = plain | {f"{name}, 8-bit KV": {**one, "settings": KEPT_IN_BYTES} for name, one in plain.items()}
        alone = play_all(spec, ALONE)
        for size in (2, 3):
            ranks = run_ranks(size, "tests.ranks.playing", json.dumps(spec))
            for name in spec:
                wanted = tokens(alone, name)["greedy"]
                got = {
                    f"{kind}, rank {rank}": said
                    for rank, told in enumerate(ranks)
                    for kind, said in tokens(told, name).items()
                }
                differing = {kind: _first(wanted, said) for kind, said in got.items() if said != wanted}
                differ += bool(differing)
                said = (
                    f"DIFFER from one rank's: {differing}" if differing else "equal one rank's, with drafts and without"
                )
                sys.stdout.write(f"{name}: {count} tokens of {len(wanted)} rows on each of {size} ranks {said}\n")
                sys.stdout.flush()
    sys.exit(1 if differ else 0)


def _first(wanted: Sequence[Sequence[int]], said: Any) -> list[int]:
    """Of each row, how many tokens are equal."""
    return [
        next((place for place, (one, two) in enumerate(zip(a, b, strict=True)) if one != two), len(a))
        for a, b in zip(wanted, said, strict=True)
    ]


main()
