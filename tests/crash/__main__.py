"""`python -m tests.crash N`: N times, ten clients with a prompt that crashes the model, beside 16
streams. What it costs."""

# ruff: noqa: T201
from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.crash.playing import CLIENTS, STREAMS, play
from tests.families import save

NOT_READY_S = 3.0


def main(rounds: int = 5) -> int:
    worst_s, wrong = 0.0, 0
    with TemporaryDirectory() as scratch:
        model = Path(save("llama", Path(scratch) / "llama"))
        for number in range(rounds):
            met = play(model)
            equal = sum(mine == theirs for mine, theirs in zip(met.texts, met.wanted, strict=True))
            refused = sum(code == "request_crashes_engine" for _, code in met.errors)
            good = equal == STREAMS and refused == CLIENTS + 1 and met.same_process
            worst_s, wrong = max(worst_s, met.not_ready_s), wrong + (not good)
            print(
                f"{number + 1}: {equal} of {STREAMS} streams whole and equal, {refused} of "
                f"{CLIENTS + 1} refused, "
                f"{met.recovery['crashes']} crashes, not ready for {met.not_ready_s:.2f} s, "
                f"longest gap {met.gap_s:.2f} s",
                flush=True,
            )
    print(f"{rounds} rounds, {wrong} wrong; never not ready for more than {worst_s:.2f} s")
    return int(wrong > 0 or worst_s > NOT_READY_S)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
