"""Greedy tokens of every family at one, two and three ranks: `just ranks-parity 512`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.ranks.launching import run_ranks
from tests.ranks.models import CONFIGS
from tests.ranks.playing import play_all
from tests.ranks.test_parity import saved, tokens
from trouper.engine.group import ALONE


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    differ = 0
    with tempfile.TemporaryDirectory() as directory:
        spec = saved(Path(directory), {name: {"greedy": count} for name in CONFIGS})
        alone = play_all(spec, ALONE)
        for size in (2, 3):
            ranks = run_ranks(size, "tests.ranks.playing", json.dumps(spec))
            for name in CONFIGS:
                same = all(tokens(told, name) == tokens(alone, name) for told in ranks)
                differ += not same
                rows = len(alone[name]["greedy"])
                said = "equal one rank's" if same else "DIFFER from one rank's"
                sys.stdout.write(f"{name}: {count} tokens of {rows} rows on each of {size} ranks {said}\n")
                sys.stdout.flush()
    sys.exit(1 if differ else 0)


main()
