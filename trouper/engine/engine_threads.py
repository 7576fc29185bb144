"""OS threads of engines. The next model that loads gets the thread of one that was unloaded.

MLX keeps what a thread has used for as long as the process lives: a stream with a thread of its
own, and 13 to 42 kB. With a new thread for each model that loads, a server whose models come and go
would grow without bound.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

import trio

T = TypeVar("T")
IDLE = "idle engine thread"
"""Name of a thread without an engine."""


class EngineThread:
    """A thread that runs jobs one after another. An exception in a job is raised in its caller and
    does not end the thread."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.is_sound = True
        """Whether another engine may have the thread: no job of it has crashed."""
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
            del job  # Else it would hold what it has used until the next one comes.

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` and wait, also when cancelled: a thread is never abandoned (F18). Raises what
        `work` raises, `BaseException` too."""
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
        """End the thread after its last job."""
        self._jobs.put(None)


class EngineThreads:
    """Threads that no engine has. There are never more threads than there were engines at a
    time."""

    def __init__(self) -> None:
        self._idle: list[EngineThread] = []

    def take(self, name: str) -> EngineThread:
        """Return a thread, an idle one if there is any, with this name."""
        thread = self._idle.pop() if self._idle else EngineThread()
        thread.name = name
        return thread

    def give_back(self, thread: EngineThread) -> None:
        """Keep a thread whose jobs are done for the next engine. One of a crashed engine ends
        instead."""
        thread.name = IDLE
        if thread.is_sound:
            self._idle.append(thread)
        else:
            thread.end()


THREADS = EngineThreads()
"""Those of the process. MLX knows threads of the process, whatever event loop has started them."""
