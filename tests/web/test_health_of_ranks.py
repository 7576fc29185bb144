"""/health of several ranks: whose disk is off, what a follower's part of the cache does, and how
they share the model."""

from __future__ import annotations

import json

import attrs
import pytest

from tests.fakes import FakeEngine
from tests.web.serving import exchange, get, serving
from trouper.cli.server_process import first_line
from trouper.protocol.health import DirectoryStats, RanksStats, RankStats
from trouper.protocol.model import LoadedModel


async def test_r4_it_says_whose_disk_is_off() -> None:
    reason = "No space left on device"
    follower = DirectoryStats(path="/there", blocks=3, damaged=1, reason=reason)
    async with serving() as served:
        watches = served.runtime._watches
        watches.ranks.publish(
            RanksStats(
                ranks=(RankStats(rank=0), RankStats(rank=1, directory=follower), RankStats(rank=2))
            )
        )
        watches.directory.publish(
            DirectoryStats(path="/here", lacking=2, reason=f"rank 1: {reason}")
        )
        told = json.loads((await exchange(served, get("/health")))[2])
    assert (told["directory"]["attached"], told["directory"]["reason"]) == (
        False,
        f"rank 1: {reason}",
    )
    assert told["directory"]["lacking"] == 2
    zero, one, two = told["ranks"]
    assert (one["directory"]["path"], one["directory"]["damaged"], one["directory"]["reason"]) == (
        "/there",
        1,
        reason,
    )
    assert "directory" not in zero, "rank 0's is the server's"
    assert "directory" not in two, "it has not looked yet"


@attrs.define(eq=False)
class Piped(FakeEngine):
    async def load(self) -> LoadedModel:
        model = await super().load()
        return attrs.evolve(model, card=attrs.evolve(model.card, ranks=3, pipeline=True))


@pytest.mark.parametrize("engine", [FakeEngine, Piped])
async def test_a_pipeline_is_named(engine: type[FakeEngine]) -> None:
    async with serving(engine()) as served:
        health = json.loads((await exchange(served, get("/health")))[2])
        line = first_line("http://here", "mine", served.runtime.model)
    assert health["pipeline"] is (engine is Piped)
    assert (", a pipeline of 3 ranks) on simulated is ready" in line) == (engine is Piped)
