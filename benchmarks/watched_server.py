"""`python -m benchmarks.watched_server REPORT serve ...`: the server, which notes what rows and
blocks hold after each step of the engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trouper.cli import main
from trouper.engine.step import Launched, StepEngine
from trouper.protocol.plans import Stepped


def watch(report: Path) -> None:
    collect, seen = StepEngine.collect, {"steps": 0, "largest": 0}

    def collected(engine: StepEngine, launched: Launched) -> Stepped:
        stepped = collect(engine, launched)
        held = engine.nbytes + (engine.blocks.nbytes if engine._blocks is not None else 0)
        seen["steps"] += 1
        if held > seen["largest"] or seen["steps"] % 100 == 0:
            seen["largest"] = max(seen["largest"], held)
            report.write_text(json.dumps(seen))
        return stepped

    StepEngine.collect = collected  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    watch(Path(sys.argv.pop(1)))
    main(prog_name="trouper")
