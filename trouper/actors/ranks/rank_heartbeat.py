"""A rank's heartbeat: sending it on the control link, and detecting that the other end has stopped
sending.

Both ends send heartbeats from the start, whatever their engines do, and both watch for silence. A
process that died closes its connection, which needs no heartbeat. One that is stopped, or behind a
broken cable, keeps its connection open: only its silence shows it, after `--rank-timeout-s`.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from trouper.actors.ranks.rank_link import Link
from trouper.protocol.link import Heartbeat
from trouper.protocol.wire import encode

HEARTBEAT_S = 0.5


def heartbeat_interval(timeout_s: float) -> float:
    """Interval of heartbeats, and of looking for them: several within the time after which a silent
    rank is lost."""
    return min(HEARTBEAT_S, timeout_s / 4)


async def send_heartbeats(
    outbox: trio.MemorySendChannel[bytes], heartbeat: Callable[[], Heartbeat], every_s: float
) -> None:
    """Send heartbeats periodically. A full outbox needs none, since its messages are signs of life,
    too."""
    while True:
        try:
            outbox.send_nowait(encode(heartbeat()))
        except trio.WouldBlock:
            pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        await trio.sleep(every_s)


async def wait_until_silent(link: Link, timeout_s: float, every_s: float) -> None:
    """Return when nothing was received on the link for `timeout_s`.

    A check that comes late means that this process itself was suspended. Then messages of that time
    may wait in the socket, so the link gets the whole time limit again.
    """
    checked_at = trio.current_time()
    while trio.current_time() - link.heard_at <= timeout_s:
        await trio.sleep(every_s)
        now = trio.current_time()
        if now - checked_at > timeout_s / 2:
            link.heard_at = now
        checked_at = now
