"""The graph: seven actors, their channels, one screen.

    edge --requests--> RequestIntake --admitted--> Scheduler --plans--> ModelStepper
                                                       ^------results-------'
    with several ranks:
    Scheduler --plans--> RankMirror --mirrored--> ModelStepper
        ^------results-------'   ^-----answers---------'
    Scheduler, CacheJanitor --orders--> SSDWriter --admitted (news)--> Scheduler
    if the model takes images:
    Scheduler --images--> ImageDecoder --admitted (news)--> Scheduler
    watches: stats, batch, memory, directory, actors (latest value, nobody waits)

Blocking sends point inwards (requests, admitted); outward edges have room by contract; the rest
sheds.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from math import inf
from typing import Any

import attrs
import trio

from trouper.actors.cache_janitor import keep_tidy
from trouper.actors.image_decoder import decode_images, refuse_images
from trouper.actors.model_stepper import step_model
from trouper.actors.rank_mirror import MirrorEdges, lead_ranks
from trouper.actors.ranks.leader import Leader, gather_ranks, leave_ranks, or_rank_lost
from trouper.actors.ranks.leader_disk import LeaderDisk
from trouper.actors.request_intake import take_in_requests
from trouper.actors.runtime.adapter_table import AdapterTable
from trouper.actors.runtime.channels import Channels, Edge, Watches
from trouper.actors.runtime.disk_orders import DiskWriter, WriterEdges
from trouper.actors.runtime.runtime import Runtime
from trouper.actors.runtime.submission import Submission
from trouper.actors.runtime.supervision import RestartLimit, WriterSupervision, innermost, supervise
from trouper.actors.scheduler import Inbox, NoMoreRequests, SchedulerEdges, schedule
from trouper.actors.scheduling.cache_namespace import cache_namespace
from trouper.actors.scheduling.crash_attribution import Verdict
from trouper.actors.scheduling.crash_recovery import Recovery
from trouper.actors.scheduling.disk_tier import ANSWER_S
from trouper.actors.ssd_writer import directory_for, write_to_disk
from trouper.protocol.health import AdapterStats
from trouper.protocol.media import DecodeImage
from trouper.protocol.model import Engine, LoadedModel, MemoryStats
from trouper.protocol.plan_channel import plan_channel
from trouper.protocol.plans import PLANS_IN_FLIGHT
from trouper.protocol.problems import Problem
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.settings import Settings

DISK_KNOWN_S = 10.0
"""Maximum wait at the start for the catalogue of the disk."""
LAST_WRITES_S = 5.0
log = logging.getLogger("trouper.graph")


CHANNELS = {
    "requests": Edge("edge", "RequestIntake", 16, "blocks"),
    "admitted": Edge("RequestIntake, SSDWriter, ImageDecoder", "Scheduler", 64, "blocks"),
    "plans": Edge("Scheduler", "ModelStepper, RankMirror", PLANS_IN_FLIGHT, "never full"),
    "mirrored": Edge("RankMirror", "ModelStepper", PLANS_IN_FLIGHT, "never full"),
    "answers": Edge("ModelStepper", "RankMirror", PLANS_IN_FLIGHT, "never full"),
    "results": Edge("ModelStepper, RankMirror", "Scheduler", PLANS_IN_FLIGHT, "never full"),
    "orders": Edge("Scheduler, CacheJanitor", "SSDWriter", 64, "sheds"),
    "images": Edge("Scheduler", "ImageDecoder", 64, "never full"),
}


async def run_graph(
    settings: Settings,
    engine: Engine,
    *,
    limit: RestartLimit | None = None,
    graphs: int = 1,
    own_memory: Collection[str] = (),
    ranks: Leader | None = None,
    disk_writer: DiskWriter = write_to_disk,
    task_status: trio.TaskStatus[Runtime] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Load the model, start the actors, hand out the `Runtime`; return when drained. `graphs`:
    number of graphs that share the memory, except for settings in `own_memory`. `ranks`: this is
    rank 0 of a group. Raises `ModelUnusable`, and `RankLost` once every request was answered;
    never, if the engine waits for the lost rank: look at `ranks.lost`."""
    async with trio.open_nursery() as thread:
        await thread.start(engine.run)
        if ranks is not None:
            ranks = await gather_ranks(thread, engine, ranks)
        model = await (engine.load() if ranks is None else or_rank_lost(engine.load(), ranks))
        if ranks is not None:
            model = await or_rank_lost(ranks.all_ready(model), ranks)
        card = attrs.evolve(
            model.card, cache_bytes=model.card.cache_bytes // graphs, memory_sharers=graphs
        )
        model = attrs.evolve(model, card=card)
        settings = _with_share(settings, graphs, own_memory)
        await Graph(settings, engine, model, ranks, disk_writer).run(
            limit or RestartLimit(), task_status
        )
        if ranks is not None:
            await leave_ranks(ranks)
        thread.cancel_scope.cancel()


def _with_share(settings: Settings, graphs: int, own: Collection[str]) -> Settings:
    for name in ("cache_memory", "kv_memory"):
        size: ByteSize | None = getattr(settings, name)
        if size is not None and name not in own:
            share: dict[str, Any] = {name: ByteSize(size // graphs)}
            settings = attrs.evolve(settings, **share)
    return settings


class Graph:
    """The actors of one model, and channels that outlive a crash.

    The shutdown has a fixed order. `Runtime.drain` closes `requests`; the intake ends after the
    last one and sends `NoMoreRequests`. The scheduler ends when no request is left and closes
    `plans`, so that mirror and stepper end after the last plan. Only then are undelivered requests
    answered, since before an actor could still own them. Then the decoder is cancelled, whose
    images nobody needs, and the janitor, which would order new work of the writer. Then `orders` is
    closed, and the writer ends after its last order, within LAST_WRITES_S. `finished` is set last.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        model: LoadedModel,
        ranks: Leader | None,
        disk_writer: DiskWriter,
    ) -> None:
        self._settings, self._engine, self._model, self._ranks = settings, engine, model, ranks
        self._disk_writer = disk_writer
        self._channels = Channels(CHANNELS)
        self._requests, self._requests_in = self._channels.open("requests")
        self._admitted, self._admitted_in = self._channels.open("admitted")
        self._orders, self._orders_in = self._channels.open("orders")
        self._images: trio.MemorySendChannel[DecodeImage] | None = None
        self._images_in: trio.MemoryReceiveChannel[DecodeImage] | None = None
        if model.card.images is not None:
            self._images, self._images_in = self._channels.open("images")
        self._watches = Watches(settings) if ranks is None else Watches(settings, ranks=ranks.stats)
        self._watches.adapters.publish(AdapterStats(held_bytes=model.card.adapter_bytes))
        self._recovery = Recovery()
        self._scope = trio.CancelScope()
        self._disk_known = trio.Event()
        self._namespace = cache_namespace(model.card, settings)
        self._runtime = Runtime(
            settings=settings,
            model=model.card,
            tokenizer=model.tokenizer,
            requests=self._requests,
            watches=self._watches,
            channels=self._channels,
            scope=self._scope,
            adapters=AdapterTable(model.card.id, model.card.adapters),
            engine=engine,
        )

    async def run(self, limit: RestartLimit, task_status: trio.TaskStatus[Runtime]) -> None:
        watches = self._watches
        try:
            async with trio.open_nursery() as background:
                background.start_soon(self._end_when_lost)
                with self._scope:
                    async with trio.open_nursery() as helpers:
                        aiding: trio.CancelScope = await helpers.start(
                            _in_scope, partial(self._tidy_and_decode, limit)
                        )
                        helpers.start_soon(self._keep_writing, limit)
                        async with trio.open_nursery() as actors:
                            actors.start_soon(
                                partial(
                                    supervise,
                                    self._intake,
                                    watches.request_intake,
                                    limit,
                                    needed=True,
                                )
                            )
                            actors.start_soon(
                                partial(
                                    supervise,
                                    self._group,
                                    watches.group,
                                    limit,
                                    needed=True,
                                    judge=self._judge,
                                )
                            )
                            # So that the first request finds what lies there.
                            with trio.move_on_after(DISK_KNOWN_S):
                                await self._disk_known.wait()
                            task_status.started(self._runtime)
                        _answer_undelivered(
                            self._requests_in, self._admitted_in, self._runtime.problem_of_end()
                        )
                        aiding.cancel()
                        self._orders.close()  # The writer ends after the last order.
                        helpers.cancel_scope.deadline = trio.current_time() + LAST_WRITES_S
                background.cancel_scope.cancel()
        finally:
            self._close()
            self._runtime.finished.set()

    async def _intake(self) -> None:
        spread = None if self._ranks is None else self._ranks.grammars.spread
        await take_in_requests(
            self._requests_in, self._admitted, self._model, self._settings, spread
        )
        await self._admitted.send(NoMoreRequests())

    async def _tidy_and_decode(self, limit: RestartLimit) -> None:
        watches = self._watches
        janitor = partial(
            keep_tidy,
            self._orders,
            self._memory,
            memory=watches.memory,
            scheduler=watches.stats,
            adapters=watches.adapters,
            settings=self._settings,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_decoding, limit)
            await supervise(janitor, watches.cache_janitor, limit, needed=False)

    async def _keep_decoding(self, limit: RestartLimit) -> None:
        if self._images_in is None:
            return
        decoder = partial(decode_images, self._images_in, self._admitted)
        await supervise(decoder, self._watches.image_decoder, limit, needed=False)
        if self._watches.image_decoder.latest.state == "degraded":
            await refuse_images(self._images_in, self._admitted)

    async def _keep_writing(self, limit: RestartLimit) -> None:
        watches = self._watches
        supervision = WriterSupervision(
            orders=self._orders_in,
            news=self._admitted,
            stats=watches.ssd_writer,
            directory=watches.directory,
        )
        await supervision.supervise(self._writer(), limit)

    def _writer(self) -> Callable[[], Awaitable[None]]:
        card, settings = self._model.card, self._settings
        edges = WriterEdges(
            self._orders_in,
            self._admitted,
            self._watches.directory,
            self._watches.stats,
            reads_in_parts=True,
        )
        if self._ranks is not None:
            return LeaderDisk(edges, self._ranks, card, settings, self._disk_writer).run
        return partial(
            self._disk_writer, edges, directory_for(card, settings), self._namespace, settings
        )

    async def _group(self) -> None:
        """Run Scheduler, ModelStepper and RankMirror, which crash and restart together."""
        # A crash ends a group of ranks: followers cannot continue with a new engine of rank 0.
        try:
            await self._run_group()
        except* Exception as crash:
            if self._ranks is None:
                raise
            await self._ranks.crashed(innermost(crash))
            await trio.sleep_forever()

    def _judge(self, crash: BaseException) -> Verdict:
        verdict = self._recovery.judge(crash, trio.current_time())
        self._publish_stats()
        return verdict

    def _publish_stats(self, errored: int = 0) -> None:
        stats = self._watches.stats.latest
        recovery = self._recovery.look(trio.current_time())
        errored += stats.requests_errored
        self._watches.stats.publish(
            attrs.evolve(stats, recovery=recovery, requests_errored=errored)
        )

    async def _run_group(self) -> None:
        plans, stepper_in = plan_channel(*self._channels.open("plans"))
        results, results_in = self._channels.open("results")
        answers, mirror, crashed = results, None, None
        if self._ranks is not None:
            plans_in = stepper_in
            mirrored, stepper_in = plan_channel(*self._channels.open("mirrored"))
            answers, answers_in = self._channels.open("answers")
            mirror = partial(
                lead_ranks, MirrorEdges(plans_in, mirrored, answers_in, results), self._ranks
            )
            crashed = self._ranks.crashed
        edges = SchedulerEdges(
            admitted=self._admitted_in,
            plans=plans,
            results=results_in,
            orders=self._orders,
            images=self._images,
            disk_known=self._disk_known,
            # LeaderDisk answers with whole reads, and has a limit of its own.
            disk_answer_s=ANSWER_S if self._ranks is None else inf,
            watches=self._watches,
        )
        async with trio.open_nursery() as group:
            recovery = self._recovery if self._ranks is None else None
            group.start_soon(
                partial(
                    schedule, edges, self._model, self._namespace, self._settings, recovery=recovery
                )
            )
            if mirror is not None:
                group.start_soon(mirror)
            group.start_soon(step_model, stepper_in, answers, self._engine, crashed)

    def _memory(self) -> MemoryStats:
        memory = self._engine.memory()
        return memory if self._ranks is None else self._ranks.memory(memory)

    async def _end_when_lost(self) -> None:
        if self._ranks is not None:
            await self._ranks.lost.wait()
            self._runtime.draining = True
            self._scope.cancel(reason=self._ranks.reason)
            await trio.lowlevel.checkpoint()  # Scheduler and RequestIntake answer theirs.
            self._close()

    def _close(self) -> None:
        self._runtime.draining = True
        for channel in (self._requests, self._orders, self._orders_in, self._admitted):
            channel.close()
        self._publish_stats(errored=self._recovery.end())
        _answer_undelivered(self._requests_in, self._admitted_in, self._runtime.problem_of_end())


async def _in_scope(
    run: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[trio.CancelScope]
) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        await run()


def _answer_undelivered(
    requests: trio.MemoryReceiveChannel[Submission],
    admitted: trio.MemoryReceiveChannel[Inbox],
    problem: Problem,
) -> None:
    """Answer requests left in a channel, which no actor owns (rule 7)."""
    with requests, admitted:
        for channel in (requests, admitted):
            while True:
                try:
                    message: Submission | Inbox = channel.receive_nowait()
                except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                    break
                match message:
                    case Submission():
                        message.fail(problem)
                    case _:  # News of the disk and of images.
                        pass
