"""/health of several ranks: whose disk is off, and what a follower's part of the cache does."""

from __future__ import annotations

import json

from tests.web.serving import exchange, get, serving
from trouper.protocol.health import DirectoryStats, RanksStats, RankStats


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
