"""Work on the engine's thread beside a session of plans: a piece after each plan, all of it while
no plan waits.

So adapters are loaded and unloaded while rows decode, and no row waits for more than one piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

import attrs
import trio

from trouper.protocol.problems import ModelUnusable

T = TypeVar("T")
Pieces = Generator[bool, None, T]
"""Yields between two pieces: True if the next one must wait for another plan."""


def model_unloaded() -> ModelUnusable:
    """What ends a job whose engine has ended."""
    return ModelUnusable("the model was unloaded meanwhile", "try again")


@attrs.define(eq=False)
class SideJob(Generic[T]):
    """A job, and its outcome once it is done."""

    pieces: Pieces[T]
    token: trio.lowlevel.TrioToken
    done: trio.Event = attrs.field(factory=trio.Event)
    waits: bool = False
    """Whether the next piece waits for another plan."""
    result: list[T] = attrs.field(factory=list)
    error: Exception | None = None

    def work(self) -> bool:
        """Do the next piece. Returns whether the job is done. An exception is the job's, and never
        the session's."""
        try:
            self.waits = next(self.pieces)
        except StopIteration as end:
            self.result.append(end.value)
        except Exception as error:  # noqa: BLE001 - raised where the job was ordered.
            self.error = error
        else:
            return False
        self.token.run_sync_soon(self.done.set)
        return True


class SideWork:
    """Jobs of one engine, one after another."""

    def __init__(self) -> None:
        self._jobs: deque[SideJob[Any]] = deque()
        self._closed = False

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    async def run(self, pieces: Pieces[T], wake: Callable[[], None]) -> T:
        """Have a job done by the session that runs, or by the next one, and wait. `wake` lets a
        session without plans look. Raises what the job raises, and `ModelUnusable` if the engine
        ends before."""
        if self._has_ended():
            raise model_unloaded()
        job = SideJob(pieces, trio.lowlevel.current_trio_token())
        self._jobs.append(job)
        if self._has_ended():  # On its own thread, since the first look.
            self.close()
        wake()
        await job.done.wait()
        if job.error is not None:
            raise job.error
        result: T = job.result.pop()
        return result

    def _has_ended(self) -> bool:
        return self._closed

    def work(self, *, planned: bool) -> bool:
        """Do a piece, on the engine's thread. `planned`: a plan was carried out since the last one.
        Returns whether there was one to do."""
        if not self._jobs or (self._jobs[0].waits and not planned):
            return False
        if self._jobs[0].work():
            self._jobs.popleft()
        return True

    def close(self) -> None:
        """End all jobs with an error."""
        self._closed = True
        while self._jobs:
            job = self._jobs.popleft()
            job.pieces.close()
            job.error = model_unloaded()
            job.token.run_sync_soon(job.done.set)
