"""The RankMirror actor, which exists only with several ranks. It waits on plans and on the engine's
answers; it owns the control links to the other ranks.

Rank 0's mirror adds the expected state to each plan, sends the plan to the followers, corrects the
expected state by the answers, and passes the answers on. `ranks/follower.py` is the followers'
counterpart.
"""

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
    """Channels of rank 0's mirror in a group of several ranks."""

    plans: PlanReceiver
    mirrored: PlanSender
    answers: trio.MemoryReceiveChannel[Stepped]
    results: trio.MemorySendChannel[Stepped]


async def lead_ranks(edges: MirrorEdges, leader: Leader) -> None:
    """Run the actor. It ends when the plans end and all are answered. There is no checkpoint
    between the copies of a plan: either all ranks get it, or none."""
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
