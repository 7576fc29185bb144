"""The mirror of one rank alone."""

from __future__ import annotations

import trio

from trouper.actors.rank_mirror import mirror_plans
from trouper.protocol.plans import Plan


async def test_a_plan_for_a_stepper_that_has_ended_is_no_crash() -> None:
    """When all end, the stepper may be the first: the plan that the scheduler sends then was taken for a crash, once in CI."""
    sent, plans = trio.open_memory_channel[Plan](2)
    mirrored, taken = trio.open_memory_channel[Plan](2)
    taken.close()
    with sent:
        sent.send_nowait(Plan(0))
    await mirror_plans(plans, mirrored)
    assert plans.statistics().current_buffer_used == 0
