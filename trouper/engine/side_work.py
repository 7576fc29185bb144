"""Work beside a session of plans, such as loading adapters: a piece after each plan, all while no
plan waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

import attrs
import trio

from trouper.protocol.problems import ModelUnusable

T = TypeVar("T")
Pieces = Generator[bool, None, T]
"""Yields True if the next piece must wait for another plan."""


def model_unloaded() -> ModelUnusable:
    return ModelUnusable("the model was unloaded meanwhile", "try again")


@attrs.define(eq=False)
class SideJob(Generic[T]):
    pieces: Pieces[T]
    token: trio.lowlevel.TrioToken
    done: trio.Event = attrs.field(factory=trio.Event)
    waits: bool = False
    """Whether the next piece waits for another plan."""
    result: list[T] = attrs.field(factory=list)
    error: Exception | None = None

    def work(self) -> bool:
        """Do a piece; True when done. Exceptions belong to the job, never to the session."""
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
    def __init__(self) -> None:
        self._jobs: deque[SideJob[Any]] = deque()
        self._closed = False

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    async def run(self, pieces: Pieces[T], wake: Callable[[], None]) -> T:
        """Have the session do a job, and wait. `wake` wakes a session without plans. Raises the
        job's exception, and `ModelUnusable` if the engine ends."""
        if self._has_ended():
            raise model_unloaded()
        job = SideJob(pieces, trio.lowlevel.current_trio_token())
        self._jobs.append(job)
        if self._has_ended():  # The engine's thread may have ended since the first look.
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
        """Do a piece on the engine's thread; False if none waits. `planned`: a plan was run since
        the last piece."""
        if not self._jobs or (self._jobs[0].waits and not planned):
            return False
        if self._jobs[0].work():
            self._jobs.popleft()
        return True

    def close(self) -> None:
        self._closed = True
        while self._jobs:
            job = self._jobs.popleft()
            job.pieces.close()
            job.error = model_unloaded()
            job.token.run_sync_soon(job.done.set)
