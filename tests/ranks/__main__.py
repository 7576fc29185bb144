"""Greedy tokens of every family at one, two and three ranks, with drafts, with 8-bit KV, and as a
pipeline: `just ranks-parity 512`; some of it: `just ranks-parity 512 llama --ranks 3`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.ranks.launching import run_ranks
from tests.ranks.models import CONFIGS
from tests.ranks.playing import play_all
from tests.ranks.test_parity import KEPT_IN_BYTES, PIPELINE, saved, tokens
from trouper.engine.distributed.pipeline import FAMILIES
from trouper.engine.distributed.rank_group import ALONE

ROUNDINGS = range(1, 9)
EIGHT_BITS = ", 8-bit KV"
STAGES = ", a pipeline"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tokens", type=int, nargs="?", default=512)
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=[*CONFIGS])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    options = parser.parse_args()
    differ = 0
    with tempfile.TemporaryDirectory() as directory:
        plain = saved(
            Path(directory),
            {name: {"greedy": options.tokens, "drafts": True} for name in options.families},
        )
        spec = plain | {
            name + EIGHT_BITS: {**one, "settings": KEPT_IN_BYTES} for name, one in plain.items()
        }
        alone = play_all(spec, ALONE)
        sure = {name: sure_tokens(one, alone[name]["greedy"]) for name, one in spec.items()}
        for size in options.ranks:
            stages = {
                name + STAGES: {**plain[name], "settings": PIPELINE}
                for name in sorted(FAMILIES & plain.keys())
                if CONFIGS[name]["num_hidden_layers"] % size == 0
            }
            alone |= {name: alone[name.removesuffix(STAGES)] for name in stages}
            sure |= {name: sure[name.removesuffix(STAGES)] for name in stages}
            ranks = run_ranks(size, "tests.ranks.playing", json.dumps(spec | stages))
            for name in spec | stages:
                equal = [
                    _first(alone[name]["greedy"], said)
                    for told in ranks
                    for said in tokens(told, name).values()
                ]
                least = [min(row) for row in zip(*equal, strict=True)]
                wrong = any(one < two for one, two in zip(least, sure[name], strict=True))
                differ += wrong
                said = "DIFFER from one rank's" if wrong else "equal one rank's"
                sys.stdout.write(
                    f"{name}, {size} ranks, with drafts and without: {least} of {sure[name]} "
                    f"tokens {said}\n"
                )
                sys.stdout.flush()
    sys.exit(1 if differ else 0)


def sure_tokens(spec: dict[str, Any], wanted: Sequence[Sequence[int]]) -> list[int]:
    """Of each row, how many tokens do not hang on rounding. With 8-bit KV a change of 1e-6 can
    round a value to the next step, which is a hundredth, and that a router to another expert; so as
    many as other rounding leaves at one rank."""
    sure = [len(row) for row in wanted]
    if "settings" not in spec:
        return sure
    for seed in ROUNDINGS:
        told = play_all({"it": {**spec, "drafts": False, "jitter": seed}}, ALONE)
        sure = [min(both) for both in zip(sure, _first(wanted, told["it"]["greedy"]), strict=True)]
    return sure


def _first(wanted: Sequence[Sequence[int]], said: Any) -> list[int]:
    """Of each row, how many tokens are equal."""
    return [
        next(
            (place for place, (one, two) in enumerate(zip(a, b, strict=True)) if one != two), len(a)
        )
        for a, b in zip(wanted, said, strict=True)
    ]


main()
