"""RankMirror. Waits on plans, and with several ranks on the engine's answers; owns the control links to the other ranks.

At one rank it is the identity. Rank 0's adds to each plan the state that it expects, repeats it to the followers and keeps
the ledger by the answers, which it passes on. A follower's is in `following.py`.
"""

from __future__ import annotations

from contextlib import suppress

import attrs
import trio

from trouper.actors.ranks.expected_state import ExpectedState
from trouper.actors.ranks.leader import Leader
from trouper.protocol.plans import Plan, Stepped


async def mirror_plans(plans: trio.MemoryReceiveChannel[Plan], mirrored: trio.MemorySendChannel[Plan]) -> None:
    """Repeat each plan, in order. `mirrored` has the room of `plans`, so a full channel is a bug, not a wait."""
    with mirrored:
        async for plan in plans:
            mirrored.send_nowait(plan)


@attrs.frozen(eq=False)
class MirrorEdges:
    """The channels of rank 0's mirror, when there are others."""

    plans: trio.MemoryReceiveChannel[Plan]
    mirrored: trio.MemorySendChannel[Plan]
    answers: trio.MemoryReceiveChannel[Stepped]
    results: trio.MemorySendChannel[Stepped]


async def lead_ranks(edges: MirrorEdges, leader: Leader) -> None:
    """The actor. Ends when the plans end and all are answered. Between a plan's copies there is no checkpoint: either all
    ranks get it, or none."""
    ledger = ExpectedState()
    with edges.plans, edges.results:
        async with trio.open_nursery() as both:
            both.start_soon(_take_answers, edges, ledger, leader)
            with edges.mirrored:
                async for bare in edges.plans:
                    plan = attrs.evolve(bare, digest=ledger.digest())
                    ledger.follow(plan)
                    leader.tell(plan)
                    edges.mirrored.send_nowait(plan)


async def _take_answers(edges: MirrorEdges, ledger: ExpectedState, leader: Leader) -> None:
    with edges.answers:
        async for stepped in edges.answers:
            ledger.take(stepped)
            leader.answered(stepped)
            with suppress(trio.BrokenResourceError):  # The scheduler has left: nobody is owed it.
                edges.results.send_nowait(stepped)
