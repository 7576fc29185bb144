"""Work on a thread, where the system may start none."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import trio

T = TypeVar("T")
# A file is written in less than a second.
LAST_WORK_S = 2.0


async def run_on_thread(
    work: Callable[[], T],
    limiter: trio.CapacityLimiter,
    *,
    abandon_on_cancel: bool = True,
    thread_name: str | None = None,
) -> T:
    """Run `work` as `trio.to_thread.run_sync` does. Raises what `work` raises, and `OSError`
    (EAGAIN) if no thread can be started."""
    begun = False

    def begin() -> T:
        nonlocal begun
        begun = True
        return work()

    if thread_name is None:  # As Trio would name a thread that runs `work` itself.
        name = getattr(getattr(work, "func", work), "__name__", "work")
        thread_name = f"{name} from {trio.lowlevel.current_task().name}"
    try:
        return await trio.to_thread.run_sync(
            begin, abandon_on_cancel=abandon_on_cancel, limiter=limiter, thread_name=thread_name
        )
    except RuntimeError as error:
        if begun:
            raise
        raise OSError(errno.EAGAIN, "the system starts no further thread") from error


class DiskThread:
    """The thread on which SSDWriter uses the file system, with a limiter of its own: a slow disk
    takes no thread from others. Tests use one with virtual time or failures."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread. Cancellation waits up to LAST_WORK_S, lest a write be left
        halfway, then abandons the thread. Raises what `work` raises, and `OSError` if no thread can
        be started."""
        # A file system that does not answer (NFS, FUSE) cannot be interrupted, and must not keep
        # the process or the model alive.
        token, begun, ended = trio.lowlevel.current_trio_token(), list[bool](), trio.Event()

        def noted() -> T:
            begun.append(True)
            try:
                return work()
            finally:
                # Abandoned, and the program has gone on without it.
                with suppress(trio.RunFinishedError):
                    token.run_sync_soon(ended.set)

        try:
            return await run_on_thread(noted, self._limiter, thread_name="cache directory")
        except trio.Cancelled:
            if begun:
                with trio.move_on_after(LAST_WORK_S, shield=True):
                    await ended.wait()
            raise
