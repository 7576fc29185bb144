"""The graph: six actors, their channels, one screen.

    edge --requests--> RequestIntake --admitted--> Scheduler --plans--> RankMirror --mirrored--> ModelStepper
                                                       ^----------------results-------------------'
    Scheduler, CacheJanitor --orders--> SSDWriter --admitted (news)--> Scheduler
    watches: facts, batch, memory, directory, actors (latest value, nobody waits)

Blocking sends point inwards (requests, admitted); outward edges have room by contract; the rest sheds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import attrs
import trio

from trouper.actors.channels import Channels, Edge
from trouper.actors.intake import Admitted, take_in_requests
from trouper.actors.janitor import keep_tidy
from trouper.actors.mirror import mirror_plans
from trouper.actors.prefix import cache_namespace
from trouper.actors.runtime import Runtime
from trouper.actors.scheduler import Inbox, NoMoreRequests, SchedulerEdges, schedule
from trouper.actors.stepper import step_model
from trouper.actors.submission import Submission
from trouper.actors.supervision import RestartLimit, supervise
from trouper.actors.watches import Watches
from trouper.actors.writer import WriterEdges, write_to_disk
from trouper.protocol.errors import DRAINING
from trouper.protocol.model import Engine, LoadedModel
from trouper.protocol.plans import PLANS_IN_FLIGHT
from trouper.protocol.settings import ByteSize, Settings

DISK_KNOWN_S = 10.0
"""At the start, for the catalogue of the disk."""
LAST_WRITES_S = 5.0
"""At the end, for what is on its way to the disk."""


CHANNELS = {
    "requests": Edge("edge", "RequestIntake", 16, "blocks"),
    "admitted": Edge("RequestIntake, SSDWriter", "Scheduler", 16, "blocks"),
    "plans": Edge("Scheduler", "RankMirror", PLANS_IN_FLIGHT, "never full"),
    "mirrored": Edge("RankMirror", "ModelStepper", PLANS_IN_FLIGHT, "never full"),
    "results": Edge("ModelStepper", "Scheduler", PLANS_IN_FLIGHT, "never full"),
    "orders": Edge("Scheduler, CacheJanitor", "SSDWriter", 64, "sheds"),
}


async def run_graph(
    settings: Settings,
    engine: Engine,
    *,
    limit: RestartLimit | None = None,
    graphs: int = 1,
    task_status: trio.TaskStatus[Runtime] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Load the model, start the actors, hand out the `Runtime`; return when it was drained. Raises `ModelUnusable`.
    `graphs`: so many share the memory for cached blocks."""
    async with trio.open_nursery() as thread:
        await thread.start(engine.run)
        model = await engine.load()
        model = attrs.evolve(model, card=attrs.evolve(model.card, cache_bytes=model.card.cache_bytes // graphs))
        if settings.cache_memory is not None:
            settings = attrs.evolve(settings, cache_memory=ByteSize(settings.cache_memory // graphs))
        await _run_actors(settings, engine, model, limit or RestartLimit(), task_status)
        thread.cancel_scope.cancel()


async def _run_actors(
    settings: Settings, engine: Engine, model: LoadedModel, limit: RestartLimit, task_status: trio.TaskStatus[Runtime]
) -> None:
    channels = Channels(CHANNELS)
    requests, requests_in = channels.open("requests")
    admitted, admitted_in = channels.open("admitted")
    orders, orders_in = channels.open("orders")
    watches = Watches(settings)
    scope = trio.CancelScope()
    disk_known = trio.Event()
    runtime = Runtime(settings, model.card, model.tokenizer, requests, watches, channels, scope)

    async def group() -> None:
        """Scheduler, RankMirror and ModelStepper share fate."""
        plans, plans_in = channels.open("plans")
        mirrored, mirrored_in = channels.open("mirrored")
        results, results_in = channels.open("results")
        edges = SchedulerEdges(
            admitted=admitted_in, plans=plans, results=results_in, orders=orders, facts=watches.facts,
            memory=watches.memory, directory=watches.directory, looked=watches.looked, batch=watches.batch,
            disk_known=disk_known,
        )  # fmt: skip
        async with trio.open_nursery() as together:
            together.start_soon(schedule, edges, model, namespace, settings)
            together.start_soon(mirror_plans, plans_in, mirrored)
            together.start_soon(step_model, mirrored_in, results, engine)

    async def intake() -> None:
        await take_in_requests(requests_in, admitted, model, settings)
        await admitted.send(NoMoreRequests())

    namespace = cache_namespace(model.card, settings)
    disk_edges = WriterEdges(orders_in, admitted, watches.directory, watches.facts)
    path = (
        settings.blocks_dir if model.card.fingerprint and model.card.kv.cached and settings.cache_memory != 0 else None
    )
    janitor = partial(keep_tidy, orders, engine.memory, watches.memory, watches.facts, settings)
    writer = partial(write_to_disk, disk_edges, path, namespace, settings)
    try:
        with scope:
            async with trio.open_nursery() as helpers:
                tidying: trio.CancelScope = await helpers.start(
                    _in_scope, partial(supervise, janitor, watches.janitor, limit, needed=False)
                )
                helpers.start_soon(partial(supervise, writer, watches.writer, limit, needed=False))
                async with trio.open_nursery() as actors:
                    actors.start_soon(partial(supervise, intake, watches.intake, limit, needed=True))
                    actors.start_soon(partial(supervise, group, watches.group, limit, needed=True))
                    with trio.move_on_after(DISK_KNOWN_S):  # So that the first request, too, finds what lies there.
                        await disk_known.wait()
                    task_status.started(runtime)
                _answer_undelivered(requests_in, admitted_in)
                tidying.cancel()
                orders.close()  # The writer ends after the last order.
                helpers.cancel_scope.deadline = trio.current_time() + LAST_WRITES_S
    finally:
        runtime.draining = True
        requests.close()
        orders.close()
        orders_in.close()
        admitted.close()
        _answer_undelivered(requests_in, admitted_in)
        runtime.finished.set()


async def _in_scope(run: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        await run()


def _answer_undelivered(
    requests: trio.MemoryReceiveChannel[Submission], admitted: trio.MemoryReceiveChannel[Inbox]
) -> None:
    """What still lies in a channel when the graph ends belongs to nobody else (rule 7)."""
    with requests, admitted:
        for channel in (requests, admitted):
            while True:
                try:
                    left: Submission | Inbox = channel.receive_nowait()
                except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                    break
                match left:
                    case Submission():
                        left.fail(DRAINING)
                    case Admitted():
                        left.submission.fail(DRAINING)
                    case _:  # News of the disk.
                        pass
