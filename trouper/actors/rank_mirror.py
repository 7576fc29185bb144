"""The RankMirror actor, only with several ranks. Waits on plans and on the engine's answers; owns
the control links to the other ranks."""

from __future__ import annotations

from contextlib import suppress

import attrs
import trio

from trouper.actors.ranks.expected_state import ExpectedState
from trouper.actors.ranks.leader import Leader
from trouper.protocol.plan_channel import PlanReceiver, PlanSender
from trouper.protocol.plans import Stepped


@attrs.frozen(eq=False)
class MirrorEdges:
    plans: PlanReceiver
    mirrored: PlanSender
    answers: trio.MemoryReceiveChannel[Stepped]
    results: trio.MemorySendChannel[Stepped]


async def lead_ranks(edges: MirrorEdges, leader: Leader) -> None:
    """Run the actor, which ends when all plans are answered."""
    # Each plan gets the expected state and goes to the followers. The state is corrected by the
    # answers, which are passed on.
    # No checkpoint between the copies of a plan: all ranks get the plan, or none.
    expected = ExpectedState()
    with edges.plans, edges.results:
        async with trio.open_nursery() as both:
            both.start_soon(_take_answers, edges, expected, leader)
            with edges.mirrored:
                async for bare in edges.plans:
                    plan = attrs.evolve(bare, digest=expected.digest())
                    expected.predict(plan)
                    leader.tell(plan)
                    # The stepper has ended, as in `Scheduler`.
                    with suppress(trio.BrokenResourceError):
                        edges.mirrored.send_nowait(plan)


async def _take_answers(edges: MirrorEdges, expected: ExpectedState, leader: Leader) -> None:
    with edges.answers:
        async for stepped in edges.answers:
            expected.correct(stepped)
            leader.answered(stepped)
            with suppress(trio.BrokenResourceError):  # The scheduler has ended and needs no answer.
                edges.results.send_nowait(stepped)
