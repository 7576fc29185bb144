"""Heartbeats on the control link, in both directions from the start, whatever the engines do.

A dead process closes its connection. A stopped one, or one behind a broken cable, keeps its
connection open, and only silence shows the loss, after `--rank-timeout-s`.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from trouper.actors.ranks.rank_link import Link
from trouper.protocol.link import Heartbeat
from trouper.protocol.wire import encode

HEARTBEAT_S = 0.5


def heartbeat_interval(timeout_s: float) -> float:
    """Interval of heartbeats and of checks: several within the time limit."""
    return min(HEARTBEAT_S, timeout_s / 4)


async def send_heartbeats(
    outbox: trio.MemorySendChannel[bytes], heartbeat: Callable[[], Heartbeat], every_s: float
) -> None:
    """Send heartbeats periodically, unless the outbox is full of other signs of life."""
    while True:
        try:
            outbox.send_nowait(encode(heartbeat()))
        except trio.WouldBlock:
            pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        await trio.sleep(every_s)


async def wait_until_silent(link: Link, timeout_s: float, every_s: float) -> None:
    """Return when nothing was received for `timeout_s`."""
    # A late check means that this process was suspended, and messages may wait in the socket, so
    # the link gets a fresh time limit.
    checked_at = trio.current_time()
    while trio.current_time() - link.heard_at <= timeout_s:
        await trio.sleep(every_s)
        now = trio.current_time()
        if now - checked_at > timeout_s / 2:
            link.heard_at = now
        checked_at = now
