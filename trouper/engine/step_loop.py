"""The loop of the engine's thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar

import attrs
import trio

from trouper.engine.platform import device
from trouper.engine.step import Launched, StepEngine
from trouper.engine.warm_up import IdleWork
from trouper.protocol.plans import Plan, Stepped
from trouper.protocol.problems import ModelUnusable
from trouper.workarounds import mlx_reference_blas
from trouper.workarounds.openblas_threads import BlasThreads

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


Wake = Literal["wake"]
WAKE: Wake = "wake"
YIELD_S = 0.001
"""Seconds that the thread yields Python's lock after a first token."""
Waiting = SimpleQueue[Plan | Wake | None]
"""None: the last. WAKE: other work waits."""
WAITS = 0.05  # Fraction of a step. After longer waits the device is the bottleneck.

# Bytes of KV from which tokens are read first: a step that starts earlier copies buffers.
LARGE_KV = 2**30
SURE = 8
"""Consecutive steps without a wait before early reading is tried."""
PAUSE_STEPS = 200
"""Further steps before the next try, after an early read that waited."""


@attrs.define
class ReadAhead:
    """Decides whether tokens are read before the next step's start.

    Starting a step frees the GIL.
    """

    early: bool = False
    _easy: int = 0

    def reads_early(self, kv_bytes: Callable[[], int]) -> bool:
        """`kv_bytes` visits every buffer and is called only if needed."""
        return self.early or kv_bytes() > LARGE_KV

    def record(self, waited_s: float, step_s: float) -> None:
        """Record a read: wait and step time in seconds."""
        if waited_s <= WAITS * step_s:
            self._easy += 1
            self.early = self.early or self._easy >= SURE
        else:
            self._easy = -PAUSE_STEPS if self.early else 0
            self.early = False


@attrs.define(eq=False)
class StepLoop:
    """Answers one session's plans in order. Step n is read around the launch of step n+1 on an
    asynchronous device, and between building and sending step n+1 on a CPU."""

    engine: StepEngine
    plans: Waiting
    side: SideWork
    send: Callable[[Stepped], None]
    """Returns before the result is received."""
    idle: IdleWork = attrs.field(factory=IdleWork)
    _ahead: bool = attrs.field(init=False)
    _read_ahead: ReadAhead = attrs.field(init=False)
    _threads: BlasThreads = attrs.field(init=False)
    _unread: Launched | None = None

    def __attrs_post_init__(self) -> None:
        self._ahead, self._read_ahead = device.runs_ahead(), ReadAhead()
        self._threads = BlasThreads(None if self._ahead else mlx_reference_blas.load_fast())

    def run(self) -> None:
        self.engine.starting = self._before_sending
        while (plan := self._next()) is not None:
            rows = rows_alone(plan)
            if not self._ahead and (not rows or self._threads.would_change(rows)):
                self._read()
            self._threads.begin(rows)
            launched = self.engine.launch(plan)
            self._read()
            if plan.has_work and self._may_wait(launched):
                self._unread = launched
            else:
                self._answer(launched, self.engine.collect(launched))
                if launched.has_first_tokens_alone:
                    time.sleep(YIELD_S)
            self.side.work(planned=True)
        if self._unread is not None:  # Wait for the step in flight.
            self.engine.collect(self._unread)

    def _may_wait(self, launched: Launched) -> bool:
        """Whether the step is read with the next plan, rather than at once."""
        if self._ahead:
            # An idle engine's first token is read at once: launching takes as long as a fast GPU's
            # step.
            return not launched.has_first_tokens_alone
        # MLX bounds the operations in flight on a CPU. Building a step waits for the device if it
        # has prompts, blocks, drafts, grammars or logits processors.
        builds_without_wait = (
            rows_alone(launched.plan) > 0
            and launched.sampled is not None
            and launched.sampled.is_lazy
        )
        return builds_without_wait and self.side.is_idle and not self.plans.empty()

    def _before_sending(self) -> None:
        if self._unread is not None and (
            not self._ahead or self._read_ahead.reads_early(lambda: self.engine.nbytes)
        ):
            self._read()

    def _read(self) -> None:
        """Read an unread step. Reads at once do not count as waits."""
        if (launched := self._unread) is not None:
            began = time.perf_counter()
            stepped = self.engine.collect(launched)
            self._read_ahead.record(time.perf_counter() - began, stepped.seconds)
            self._unread = None
            self._answer(launched, stepped)

    def _answer(self, launched: Launched, stepped: Stepped) -> None:
        self._threads.record(rows_alone(launched.plan), stepped.seconds)
        self.send(stepped)

    def _next(self) -> Plan | None:
        found: Plan | Wake | None = WAKE
        while isinstance(found, str):
            while self.plans.empty() and (self.side.work(planned=False) or self._prepare()):
                pass
            found = self.plans.get()
        return found

    def _prepare(self) -> bool:
        return not self.engine.lengths() and self.idle.run_next()


def rows_alone(plan: Plan) -> int:
    """Number of decoding rows, if nothing else takes time; else 0."""
    has_other_work = (
        plan.prefill or plan.admit or plan.drafts or plan.load or plan.store or plan.encode
    )
    return 0 if has_other_work else len(plan.decode)
