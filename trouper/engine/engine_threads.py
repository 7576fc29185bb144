"""OS threads of engines, reused by the next model.

MLX keeps a stream with a thread, and 13 to 42 kB, for each thread that ever ran: a server that
swaps models would grow without bound.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

import trio

T = TypeVar("T")
IDLE = "idle engine thread"


class EngineThread:
    """Runs jobs one after another. A job's exception is raised in the caller."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.is_sound = True
        """False after a crashed job."""
        self._thread = Thread(target=self._work, name=IDLE, daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._thread.name

    @name.setter
    def name(self, name: str) -> None:
        self._thread.name = name

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # Else the thread would hold the job's objects until the next job.

    async def run(self, work: Callable[[], T]) -> T:
        """Wait for `work`, even if cancelled: threads are never abandoned (F18). Raises
        `BaseException` of `work`, too."""
        done, outcome = trio.Event(), list[T | BaseException]()
        token = trio.lowlevel.current_trio_token()

        def job() -> None:
            try:
                outcome.append(work())
            except BaseException as error:  # noqa: BLE001 - raised again where the work was ordered.
                outcome.append(error)
            token.run_sync_soon(done.set)

        await trio.lowlevel.checkpoint()
        self._jobs.put(job)
        with trio.CancelScope(shield=True):
            await done.wait()
        result = outcome.pop()
        try:
            if isinstance(result, BaseException):
                raise result
            return result
        finally:
            # Else the error holds this frame, which holds the error, whose traceback holds all the
            # rows' KV.
            del result

    def end(self) -> None:
        """End the thread after the last job."""
        self._jobs.put(None)


class EngineThreads:
    def __init__(self) -> None:
        self._idle: list[EngineThread] = []

    def take(self, name: str) -> EngineThread:
        thread = self._idle.pop() if self._idle else EngineThread()
        thread.name = name
        return thread

    def give_back(self, thread: EngineThread) -> None:
        """Keep an idle thread, or end one of a crashed engine."""
        thread.name = IDLE
        if thread.is_sound:
            self._idle.append(thread)
        else:
            thread.end()


THREADS = EngineThreads()
"""MLX's threads belong to the process, not to an event loop."""
