"""Begin and end of the group of ranks: all join, load and leave together."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import trio

from trouper.actors.ranks.leader import Leader
from trouper.actors.ranks.rank_link import LAST_MESSAGES_S, RankLost
from trouper.protocol.model import Engine
from trouper.protocol.problems import ModelUnusable, SettingsInvalid

T = TypeVar("T")


async def gather_ranks(nursery: trio.Nursery, engine: Engine, ranks: Leader) -> Leader | None:
    """Wait until all ranks have joined. None if this rank is the only one. Raises
    `SettingsInvalid`."""
    running = trio.CancelScope()

    async def run(*, task_status: trio.TaskStatus[bytes]) -> None:
        with running:
            await ranks.run(task_status=task_status)

    try:
        invitation = await nursery.start(run)
    except OSError as error:
        raise SettingsInvalid(
            f"--control-host: cannot listen there: {error.strerror or error}"
        ) from error
    joined = await or_rank_lost(engine.join(invitation), ranks)
    if joined.size == 1:
        ranks.joined.set()
        running.cancel()
        return None
    await ranks.gather(joined.size)
    return ranks


async def or_rank_lost(work: Awaitable[T], ranks: Leader) -> T:
    """Await work that all ranks do together. Raises `RankLost`, which names the lost rank, instead
    of the failure of a collective."""
    try:
        return await work
    except (ModelUnusable, SettingsInvalid):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a collective raises
        await ranks.crashed(error)
    await trio.sleep(LAST_MESSAGES_S)
    raise RankLost(ranks.reason)


async def leave_ranks(ranks: Leader) -> None:
    """End the group of ranks. Raises `RankLost` if a rank was lost."""
    if ranks.lost.is_set():
        await trio.sleep(LAST_MESSAGES_S)
        raise RankLost(ranks.reason)
    await ranks.leave()
