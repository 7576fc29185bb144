"""F20: what RankMirror foretells is what an engine then has, whatever the plans do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trio

from tests.sim import world as worlds
from tests.sim.weather import SimEngine
from trouper.actors.rank_mirror import MirrorEdges, lead_ranks
from trouper.actors.ranks.expected_state import ExpectedState
from trouper.actors.ranks.leader import Leader
from trouper.protocol import ranks
from trouper.protocol.plan_channel import PlanReceiver, plan_channel
from trouper.protocol.plans import Admit, Chunk, Plan, RowId, Stepped
from trouper.protocol.sampling import Sampling
from trouper.protocol.settings import Settings


class Foretold(SimEngine):
    """Every plan comes to it through RankMirror, without any follower; it compares each digest with
    its own state."""

    compared = 0

    async def _answer(self, plans: PlanReceiver, results: trio.MemorySendChannel[Stepped]) -> None:
        mirrored, mirrored_in = plan_channel(*trio.open_memory_channel[Plan](2))
        answers, answers_in = trio.open_memory_channel[Stepped](2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                lead_ranks, MirrorEdges(plans, mirrored, answers_in, results), Leader(Settings())
            )
            with mirrored_in, answers:
                await super()._answer(mirrored_in, answers)

    def holds(self) -> dict[RowId, Any]:
        type(self).compared += 1
        return super().holds()


def run(engine: type[SimEngine], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "SimEngine", engine)
    worlds.run_world(seed)


@pytest.mark.parametrize("seed", range(12))
def test_every_digest_is_what_the_engine_has(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, restores, tails, embeddings, evictions, drops, crashes; a world has some hundred
    plans."""
    Foretold.compared = 0
    run(Foretold, seed, monkeypatch)
    assert Foretold.compared


def test_an_embedded_prompt_is_a_row_that_never_decodes() -> None:
    ledger = ExpectedState()
    one, two = RowId(1), RowId(2)
    admits = (
        Admit(one, bytes(4 * 5), Sampling(), embed="mean"),
        Admit(two, bytes(4 * 5), Sampling()),
    )
    ledger.predict(Plan(0, admit=admits, prefill=(Chunk(one, 5), Chunk(two, 5))))
    assert ledger.digest().rows == ranks.pairs(ranks.ids_of((one, two)), np.array([0, 1]))
    assert ledger.digest().lengths == ranks.pairs(ranks.ids_of((one, two)), np.array([5, 5]))
    ledger.predict(Plan(1, drop=(one,), decode=(two,)))
    assert ledger.digest().rows == ranks.pairs(ranks.ids_of((two,)), np.array([1]))


def test_accepted_drafts_count_once_their_answer_is_there() -> None:
    """F22: from the one list of committed tokens. Rows that left meanwhile are nobody's."""
    ledger = ExpectedState()
    one, two = RowId(1), RowId(2)
    admits = tuple(Admit(row, bytes(4 * 5), Sampling()) for row in (one, two))
    ledger.predict(Plan(0, admit=admits, prefill=(Chunk(one, 5), Chunk(two, 5))))
    ledger.correct(Stepped(0, (one, two), (7, 7)))
    ledger.predict(Plan(1, decode=(one, two), drafts=(4, 0)))
    before = ledger.digest()
    assert ledger.lengths == {one: 6, two: 6}
    ledger.correct(
        Stepped(
            1, (one, one, one, two), (7, 7, 7, 7), drafted=((one, 4, 2),), order=3, tokens_hash=4
        )
    )
    assert ledger.lengths == {one: 8, two: 6}
    after = ledger.digest()
    assert (after.settled, after.order, after.tokens) == (1, 3, 4)
    assert (before.rows, before.blocks) == (after.rows, after.blocks)
    assert before.lengths != after.lengths
    ledger.predict(Plan(2, decode=(one, two), drafts=(4, 0)))
    ledger.predict(Plan(3, drop=(one,), decode=(two,)))
    ledger.correct(Stepped(2, (one, one, two), (7, 7, 7), drafted=((one, 4, 1),)))
    assert ledger.lengths == {two: 8}
