"""`python -m tests.ranks.eager serve ...`: as `trouper serve`, but rows draft whether it pays or
not."""

from __future__ import annotations

from tests.sim.world import Eager
from trouper.actors.scheduling import core
from trouper.cli import main

vars(core)["Speculation"] = Eager
main(prog_name="eager")
