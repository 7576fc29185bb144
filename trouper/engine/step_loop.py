"""The loop of the engine's thread: launches plans and reads their steps, in the order in which the
device is kept busy.

Reading a step waits for the device; launching one builds its graph, in Python, and sends it to the
device. When step n is read:

- On a device that takes a step while the one before it runs, after step n+1 was launched, or just
  before (see `ReadAhead`). A first token on an idle engine is read at once: to launch the next step
  takes as long as the step on a fast GPU, and nobody else waits for it.
- On a CPU, MLX bounds the operations in flight, so launching a step blocks until most of it has
  run. After that the graph of step n+1 is built, while the rest of step n runs; then step n is
  read, and step n+1 is sent. So clients get tokens when they are there, and the device does not
  wait for Python. Step n is read at once where the next plan is not there yet, where building waits
  for the device (prompts, blocks, drafts, grammars, logits processors), and where BLAS gets another
  number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Literal

import attrs

from trouper.engine.launched_step import Launched
from trouper.engine.platform import device
from trouper.engine.platform.read_ahead import ReadAhead
from trouper.engine.side_work import SideWork
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Plan, Stepped
from trouper.workarounds import mlx_reference_blas
from trouper.workarounds.openblas_threads import BlasThreads

Wake = Literal["wake"]
WAKE: Wake = "wake"
YIELD_S = 0.001
"""Time for which the engine's thread leaves Python's lock to the event loop after a first token: it
would hold it while it builds a step."""
Waiting = SimpleQueue[Plan | Wake | None]
"""Plans that wait for the engine's thread; None after the last one. WAKE: there is other work."""


@attrs.define(eq=False)
class StepLoop:
    """Answers the plans of one session, each with one result, in their order."""

    engine: StepEngine
    plans: Waiting
    side: SideWork
    send: Callable[[Stepped], None]
    """Sends a result without waiting until it is received."""
    _ahead: bool = attrs.field(init=False)
    _read_ahead: ReadAhead = attrs.field(init=False)
    _threads: BlasThreads = attrs.field(init=False)
    _unread: Launched | None = None

    def __attrs_post_init__(self) -> None:
        self._ahead, self._read_ahead = device.runs_ahead(), ReadAhead()
        self._threads = BlasThreads(None if self._ahead else mlx_reference_blas.load_fast())

    def run(self) -> None:
        """Run until the plans have ended."""
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
        if self._unread is not None:  # A step is in flight: wait until the device has finished it.
            self.engine.collect(self._unread)

    def _may_wait(self, launched: Launched) -> bool:
        """Whether a step that was launched is read with the next plan."""
        if self._ahead:
            return not launched.has_first_tokens_alone
        is_lazy = (
            rows_alone(launched.plan) > 0
            and launched.sampled is not None
            and launched.sampled.is_lazy
        )
        return is_lazy and self.side.is_idle and not self.plans.empty()

    def _before_sending(self) -> None:
        """Called by a launch whose graph is built."""
        if self._unread is not None and (
            not self._ahead or self._read_ahead.reads_early(lambda: self.engine.nbytes)
        ):
            self._read()

    def _read(self) -> None:
        """Read the step that was not read, if there is one. What is read at once says nothing of
        whether the thread waits."""
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
        """Wait for the next plan, and do other work meanwhile."""
        while True:
            found: Plan | Wake | None
            if self.side.is_idle or not (self.plans.empty() and self.side.work(planned=False)):
                found = self.plans.get()
                if not isinstance(found, str):
                    return found


def rows_alone(plan: Plan) -> int:
    """Number of rows that decode, if the step does nothing else that takes time; else 0."""
    return (
        0
        if plan.prefill or plan.admit or plan.drafts or plan.load or plan.store
        else len(plan.decode)
    )
