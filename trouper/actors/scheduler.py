"""The Scheduler actor. Waits on requests when idle, and on the owed answer when busy; sends plans.
The core decides (`scheduling/core.py`)."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from math import inf

import attrs
import trio

from trouper.actors.runtime.channels import STUCK_FACTOR, offer
from trouper.actors.runtime.submission import Submission
from trouper.actors.scheduling.core import Core
from trouper.actors.scheduling.core_edges import CoreWatches, DiskSeam, send_nowhere
from trouper.actors.scheduling.crash_recovery import Recovery
from trouper.actors.scheduling.disk_tier import ANSWER_S
from trouper.protocol.media import DecodeImage, ImageDecoded
from trouper.protocol.model import LoadedModel
from trouper.protocol.plan_channel import PlanSender
from trouper.protocol.plans import Plan, Stepped
from trouper.protocol.problems import Problem
from trouper.protocol.settings import Settings
from trouper.protocol.work import DiskNews, DiskOrder

MAX_GATHER_S = 0.05
"""Upper bound of the wait for further requests. Requests within this time are one burst."""
VAIN = 3
"""Number of waits in vain after which there is none."""
log = logging.getLogger("trouper.scheduler")
PIECES = 10
FLUSH_S = 5.0
"""Time limit at the end for writes in flight to the disk."""
# The engine's thread gets Python's lock, and the first token its client. More planning at once
# would delay the first token.
TURNS = 2
"""Turns of the event loop left to others around an idle engine's first step."""


@attrs.frozen
class NoMoreRequests:
    """From RequestIntake at its end. The inbox stays open for news of the disk."""


Inbox = Submission | NoMoreRequests | DiskNews | ImageDecoded


@attrs.frozen(kw_only=True, eq=False)
class SchedulerEdges:
    admitted: trio.MemoryReceiveChannel[Inbox]
    plans: PlanSender
    results: trio.MemoryReceiveChannel[Stepped]
    orders: trio.MemorySendChannel[DiskOrder]
    images: trio.MemorySendChannel[DecodeImage] | None = None
    watches: CoreWatches
    disk_known: trio.Event
    disk_answer_s: float = ANSWER_S


async def schedule(
    edges: SchedulerEdges,
    model: LoadedModel,
    namespace: str,
    settings: Settings,
    recovery: Recovery | None = None,
) -> None:
    """Run the actor, which ends when no request can come and none is left; then the plans end.
    `namespace`: hex, of all that shapes KV. `recovery`: passes requests left by a crash to the next
    scheduler; None: all end with the crash."""
    disk = DiskSeam(
        send=partial(offer, edges.orders), known=edges.disk_known.set, answer_s=edges.disk_answer_s
    )
    core = Core(
        model,
        namespace,
        settings,
        watches=edges.watches,
        disk=disk,
        recovery=recovery,
        order_image=send_nowhere if edges.images is None else partial(offer, edges.images),
    )
    try:
        with edges.plans, edges.results:
            await Scheduler(edges, settings, core).run()
    finally:
        core.end(trio.current_time())


class Scheduler:
    def __init__(self, edges: SchedulerEdges, settings: Settings, core: Core) -> None:
        self._edges, self._settings, self._core = edges, settings, core
        self._gathering = Gathering(settings.gather_ms / 1000)

    async def run(self) -> None:
        core = self._core
        core.take_up(trio.current_time())
        # The scheduler before this one may have left figures of a cache that is gone.
        core.publish()
        if core.must_prove_engine:
            await self._prove_engine()
        await self._do_steps()

    async def _do_steps(self) -> None:
        """Send plans before waiting for an answer, so that the engine always has the next one."""
        core, starts = self._core, False
        while True:
            self._take_requests()
            now = trio.current_time()
            core.drop_aborted(now)
            idle = not core.plans_in_flight
            self._send_plans(now, only_one=idle)
            if idle and core.plans_in_flight:
                starts = True
                await self._let_others_run()
                continue
            core.publish()
            if core.plans_in_flight:
                core.update(await self._receive_answer(), trio.current_time())
                if starts:
                    starts = False
                    await self._let_others_run()
                continue
            if core.accepts or core.waiting:
                await self._next_request()
            elif core.awaits_image:
                await self._receive_by(trio.current_time() + FLUSH_S)
            elif not (core.disk.busy and await self._receive_by(trio.current_time() + FLUSH_S)):
                return

    async def _prove_engine(self) -> None:
        for plan in self._core.proof(trio.current_time()):
            self._send(plan)
        while self._core.plans_in_flight:
            self._core.proved(await self._receive_answer())

    # -- requests --------------------------------------------------------------------------------

    def _take_requests(self) -> None:
        while True:
            try:
                self._hear(self._edges.admitted.receive_nowait())
            except trio.WouldBlock:
                return
            except trio.EndOfChannel:
                self._core.close()
                return

    def _hear(self, message: Inbox) -> None:
        match message:
            case Submission():
                now = trio.current_time()
                # Else the engine is idle: it has come alone.
                if self._core.waiting or self._core.plans_in_flight:
                    self._gathering.came(now)
                self._core.enqueue(message, now)
            case NoMoreRequests():
                self._core.close()
            case ImageDecoded():
                self._core.hear_image(message, trio.current_time())
            case _:
                self._core.hear(message, trio.current_time())

    async def _next_request(self) -> None:
        """Wait for a request, then up to MAX_GATHER_S for more (`Gathering`)."""
        # The wait ends now and then, so that memory is released and cached blocks go also while
        # nobody asks; and when a silent disk is to be given up.
        look_at = trio.current_time() + self._settings.janitor_interval_s
        await self._receive_by(min(look_at, self._core.disk.answer_due_at))
        if not self._core.waiting:
            return
        end, gap_s = (now := trio.current_time()) + MAX_GATHER_S, self._gathering.begin(now)
        while 0 < self._core.waiting < self._settings.rows and gap_s > 0:
            if not await self._receive_by(min(trio.current_time() + gap_s, end)):
                return

    async def _receive_by(self, deadline: float) -> bool:
        with trio.move_on_at(deadline):
            try:
                self._hear(await self._edges.admitted.receive())
            except trio.EndOfChannel:
                self._core.close()
                return False
            return True
        return False

    # -- plans and answers -----------------------------------------------------------------------

    def _send_plans(self, now: float, *, only_one: bool) -> None:
        """Keep the engine two plans ahead while there is work, or send the first one."""
        while (plan := self._core.schedule(now)) is not None:
            self._send(plan)
            if only_one or not plan.has_work:
                return

    @staticmethod
    async def _let_others_run() -> None:
        for _ in range(TURNS):
            await trio.lowlevel.checkpoint()

    def _send(self, plan: Plan) -> None:
        # The channel has room for all plans in flight, so a full one is a bug. An ended stepper
        # needs no plan.
        with suppress(trio.BrokenResourceError):
            self._edges.plans.send_nowait(plan)

    async def _receive_answer(self) -> Stepped:
        """The answer to the oldest plan. Publishes a stall (D11, F27)."""
        since, limit_s = trio.current_time(), self._settings.stall_timeout_s
        if (stepped := await self._receive_within(limit_s)) is not None:
            return stepped
        log.error("the engine has not finished a step for %g s", limit_s)
        self._core.stalled(max(since, trio.current_time() - 2 * limit_s))
        self._core.publish()
        if (stepped := await self._receive_within((STUCK_FACTOR - 1) * limit_s)) is not None:
            return stepped
        self._core.fail_all(
            Problem(
                503,
                "the device does not answer",
                "server_error",
                code="device_stuck",
                retry_after_s=30,
            )
        )
        return await self._edges.results.receive()

    async def _receive_within(self, seconds: float) -> Stepped | None:
        """An answer, or None after that time."""
        # For the device of a paused process (SIGSTOP, a container, a virtual machine) no time has
        # passed, so a pause counts as one piece at most.
        for _ in range(PIECES):
            with trio.move_on_after(seconds / PIECES):
                return await self._edges.results.receive()
        return None


@attrs.define
class Gathering:
    """Decides whether an idle engine waits for further requests. Times in seconds of the caller's
    clock."""

    # Prompts that begin together prefill at full speed; a late one prefills beside the others'
    # streams. A single user waits in vain, on a fast GPU a fifth of the time to the first token, so
    # a few waits in vain end the waiting until requests come together again.

    gap_s: float
    # Number of consecutive requests that came alone to an idle engine.
    _alone: int = 0
    _began: float = -inf

    def begin(self, now: float) -> float:
        """Note a request to an idle engine. Returns the wait for each further one, perhaps 0."""
        self._began, self._alone = now, self._alone + 1
        return self.gap_s if self._alone <= VAIN else 0.0

    def came(self, now: float) -> None:
        if now - self._began <= MAX_GATHER_S:
            self._alone = 0
