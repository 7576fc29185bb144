"""`python -m tests.ranks.diverging serve ...`: as `trouper serve`, but rank 1's engine drops a row
that nobody dropped, as soon as there are two. What a bug in a follower would look like."""

from __future__ import annotations

import os

from trouper.cli import main
from trouper.engine import host
from trouper.engine.step import Launched, StepEngine
from trouper.protocol.plans import Plan


class Dropping(StepEngine):
    done = False

    def launch(self, plan: Plan) -> Launched:
        if not self.done and len(self._rows.decoding) > 1 and not plan.drop and not plan.admit:
            self.done = True
            self._drop(self._rows.decoding[:1])
        return super().launch(plan)


if os.environ.get("MLX_RANK") == "1":
    vars(host)["StepEngine"] = Dropping
main(prog_name="diverging")
