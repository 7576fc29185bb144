"""RankMirror. Waits on plans; owns the control link to the other ranks. At one rank it is the identity."""

from __future__ import annotations

import trio

from trouper.protocol.plans import Plan


async def mirror_plans(plans: trio.MemoryReceiveChannel[Plan], mirrored: trio.MemorySendChannel[Plan]) -> None:
    """Repeat each plan, in order. `mirrored` has the room of `plans`, so a full channel is a bug, not a wait."""
    with mirrored:
        async for plan in plans:
            mirrored.send_nowait(plan)
