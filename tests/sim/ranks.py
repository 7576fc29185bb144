"""A simulated world at two ranks: the whole graph at rank 0, a follower, a link that takes its
time, collectives that hang when a rank does not come, and a fate for one of them. `python -m
tests.sim.ranks N [FIRST]` runs worlds by seeds: each without a disk, and then two lives with one.

A process that waits in a collective cannot be cancelled; it only ends when the process does. So
everybody must be answered before that.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal
from unittest import mock

import attrs
import trio
from trio.testing import memory_stream_pair

from tests.campaign import campaign
from tests.sim.clients import Client
from tests.sim.disks import SimDisks, lose_files
from tests.sim.seeded import run_seeded
from tests.sim.weather import (
    STALL_TIMEOUT_S,
    ImageWeather,
    SimEngine,
    SimulatedCrash,
    Weather,
)
from tests.sim.world import CLIENTS, Eager, World, _watched, with_images
from trouper import Runtime
from trouper.actors import graph
from trouper.actors.graph import run_graph
from trouper.actors.image_decoder import decode_images
from trouper.actors.ranks.follower import Follower
from trouper.actors.ranks.leader import Leader
from trouper.actors.ranks.rank_handshake import join_leader
from trouper.actors.ranks.rank_link import Link, RankLost
from trouper.actors.runtime.disk_orders import DiskWriter
from trouper.actors.scheduling import core as core_module
from trouper.actors.scheduling.speculation_policy import Speculation
from trouper.actors.ssd_writer import write_to_disk
from trouper.cli.rank_process import LAST_ERRORS_S
from trouper.protocol.blocks import Tensor, Tensors
from trouper.protocol.model import LoadedModel
from trouper.protocol.plan_channel import PlanReceiver
from trouper.protocol.plans import BlockId, Plan, RowId, Stepped
from trouper.protocol.ranks import Joined
from trouper.protocol.setting_fields import ByteSize

What = Literal[
    "nothing",
    "dies",
    "stops",
    "crashes",
    "drops a row",
    "forgets a block",
    "draws another token",
    "dies first",
    "dies reading",
    "dies encoding",
    "forgets an image",
]
LIMIT_S = 30.0
"""--collective-timeout-s: some steps of the worst weather take ten."""


class RankDied(Exception):
    """What the rest of a dead process raises here."""


class CollectiveFailed(Exception):
    """What a rank's engine raises when another has died, possibly before the link says so."""


@attrs.define(eq=False)
class Process:
    """One rank: what it waits for in native code ends with it, and nothing else does it."""

    ended: trio.Event = attrs.field(factory=trio.Event)
    stopped: bool = False

    async def native(self, *events: trio.Event) -> None:
        """Wait for one of them as native code does: not to be cancelled."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for one in (*events, self.ended):
                    nursery.start_soon(_then_cancel, one, nursery.cancel_scope)
        if self.ended.is_set():
            raise RankDied


async def _then_cancel(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


@attrs.define(eq=False)
class Collectives:
    """All ranks must begin the same one; who differs hangs them all."""

    broken: trio.Event = attrs.field(factory=trio.Event)
    """A rank has died and the others' collectives fail, as the ring's do; else they hang."""
    here: dict[tuple[int, object], int] = attrs.field(factory=dict)
    complete: dict[tuple[int, object], trio.Event] = attrs.field(factory=dict)
    done: int = 0

    async def meet(self, plan: Plan, process: Process) -> None:
        shared = [order.item for order in plan.encode if order.last]
        shape = (plan.step, (plan.decode, plan.prefill, *shared))
        event = self.complete.setdefault(shape, trio.Event())
        self.here[shape] = self.here.get(shape, 0) + 1
        if self.here[shape] == 2:
            event.set()
            self.done += 1
        await process.native(event, self.broken)
        if not event.is_set():
            raise CollectiveFailed


@attrs.define(eq=False)
class SlowStream(trio.abc.Stream):
    """A network: bytes come late, and not at all to or from a process that is stopped."""

    inner: trio.abc.Stream
    chance: Random
    process: Process

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._may()
        await self.inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        await trio.sleep(self.chance.choice((0, 0, 0.001, 0.05, 0.4)))
        data = await self.inner.receive_some(max_bytes)
        if not data:
            await trio.sleep(self.chance.choice((0, 0.05, 0.4)))
        await self._may()
        return data

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def _may(self) -> None:
        if self.process.stopped:
            await trio.sleep_forever()


@attrs.frozen
class Fate:
    what: What = "nothing"
    step: int = 0
    """It happens when rank 1 is about to run the first step with work from here on; rank 0's, to
    rank 0; "dies reading" when its disk is about to read for so many times."""
    loud: bool = False
    """A rank's death breaks the others' collectives."""


class Rank(SimEngine):
    """The engine of one rank."""

    def __init__(
        self, rank: int, world: RanksWorld, weather: Weather, chance: Random, trace: list[Any]
    ) -> None:
        super().__init__(weather, chance, trace)
        self.rank, self.world, self.process = rank, world, Process()
        self.leads = rank == 0
        self.compared = 0
        self.loaded = 0
        """Blocks and snapshots that came from its disk."""
        self._happened = False
        self._spoils: What | None = None
        self._inner_step, self.before_step = self.before_step, self._together

    async def load(self) -> LoadedModel:
        """Each rank has its own part of the weights, and rank 0 the encoder."""
        model = await super().load()
        images = model.card.images if self.leads else None
        card = attrs.evolve(model.card, fingerprint=f"part {self.rank}", images=images)
        return attrs.evolve(model, card=card)

    def _payload(self, block: BlockId) -> Tensors:
        return (*super()._payload(block), Tensor("U8", (1,), bytes([self.rank])))

    def _change(self, plan: Plan) -> None:
        self.loaded += len(plan.load)
        assert all(bytes(load.payload[-1].data) == bytes([self.rank]) for load in plan.load), (
            "another rank's shard"
        )
        super()._change(plan)

    async def join(self, invitation: bytes) -> Joined:
        if self.rank == 0:
            self.world.invitation = invitation
            self.world.invited.set()
        await self.world.invited.wait()
        return Joined(self.rank, 2, self.world.invitation)

    async def step(self, plans: PlanReceiver, results: trio.MemorySendChannel[Stepped]) -> None:
        """As the real one: no row that is left at the end is a fault of its own."""
        self._forget()
        try:
            await self._answer(plans, results)
        except AssertionError:
            if self.rank == 0 or not self.world.cut:
                raise
        finally:
            self._forget()

    def holds(self) -> dict[RowId, Any]:
        self.compared += 1
        return super().holds()

    async def _together(self, plan: Plan) -> None:
        fate = self.world.fate
        if (
            fate.what not in ("nothing", "dies reading")
            and not self._happened
            and plan.step >= fate.step
            and (fate.what != "dies encoding" or plan.encode)
        ):
            await self._meet_fate(fate.what)
        assert self._inner_step is not None
        await self._inner_step(plan)
        await self.world.collectives.meet(plan, self.process)

    async def _meet_fate(self, what: What) -> None:
        if (self.rank == 0) != (what == "dies first"):
            return
        self._happened = True
        match what:
            case "dies" | "dies first" | "dies encoding":
                self.world.kill(self)
                raise RankDied
            case "stops":
                self.process.stopped = True
                await self.process.native(trio.Event())
            case "crashes":
                raise ZeroDivisionError("of rank 1")
            case spoils:
                self._spoils = spoils

    def _compute(self, plan: Plan, seconds: float) -> Stepped:
        """What is wrong with it is wrong after a step: the next digest finds it, or the next step
        would hang."""
        stepped = super()._compute(plan, seconds)
        spoils, self._spoils = self._spoils, None
        if spoils == "drops a row" and self.rows:
            self.rows.popitem()
        elif spoils == "forgets a block" and self.blocks:
            self.blocks.popitem()
        elif spoils == "forgets an image" and not self.encoding:
            self._spoils = spoils  # As soon as there is one.
        elif spoils == "forgets an image":
            item, _ = self.encoding.popitem()
            self.vectors.pop(item, None)
        elif spoils == "draws another token":
            self.diary.tokens += 1
        return stepped


class SimLeader(Leader):
    """Rank 0's links over the simulated network."""

    world: RanksWorld

    async def run(self, *, task_status: trio.TaskStatus[bytes] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.watch)
            self.world.links = nursery
            task_status.started(self.invite("simulated", 1))


class SimFollower(Follower):
    world: RanksWorld

    async def _connect(self, joined: Joined) -> Link:
        return await join_leader(self.world.connect(), joined, self._settings)


@attrs.define(eq=False)
class RanksWorld(World):
    fate: Fate = Fate()
    chance: Random = attrs.field(factory=Random)
    collectives: Collectives = attrs.field(factory=Collectives)
    invitation: bytes = b""
    invited: trio.Event = attrs.field(factory=trio.Event)
    links: trio.Nursery | None = None
    ends: list[trio.abc.Stream] = attrs.field(factory=list)
    follower_said: str = "nothing"
    lost: str = ""
    killed: bool = False
    disks: SimDisks | None = None
    lacking: int = 0
    leader: SimLeader = attrs.field(init=False)
    follower: SimFollower = attrs.field(init=False)

    @property
    def cut(self) -> bool:
        """The graph did not end by itself."""
        return not self.whole or bool(self.lost)

    @property
    def ranks(self) -> tuple[Rank, Rank]:
        assert isinstance(self.engine, Rank) and isinstance(self.follower._engine, Rank)
        return self.engine, self.follower._engine

    def _disk_writer(self, rank: int) -> DiskWriter:
        return write_to_disk if self.disks is None else self.disks.writer(rank)

    def connect(self) -> trio.abc.Stream:
        ours, theirs = memory_stream_pair()
        assert self.links is not None
        self.ends += [ours, theirs]
        zero, one = self.ranks
        self.links.start_soon(self.leader.attend, SlowStream(ours, self.chance, zero.process))
        return SlowStream(theirs, self.chance, one.process)

    def kill(self, rank: Rank) -> None:
        """What the system does with what a process held."""
        self.killed = True
        if self.fate.loud:
            self.collectives.broken.set()
        rank.process.ended.set()
        for end in self.ends:
            assert isinstance(end, trio.StapledStream)
            end.send_stream.close()
            end.receive_stream.close()

    async def _graph(self, *, task_status: trio.TaskStatus[Runtime]) -> None:
        self.leader = SimLeader(self.weather.settings)
        self.leader.world = self
        one = Rank(1, self, attrs.evolve(self.weather, janitor_crash=0, poison=0), self.chance, [])
        self.follower = SimFollower(self.weather.settings, one, disk_writer=self._disk_writer(1))
        self.follower.world = self
        async with trio.open_nursery() as processes:
            processes.start_soon(self._end_rank_0)
            processes.start_soon(self._end_rank_1)
            processes.start_soon(self._follow)
            decode = partial(decode_images, process=self.decoder)
            try:
                with mock.patch.object(graph, "decode_images", decode):
                    await run_graph(
                        self.weather.settings,
                        self.engine,
                        limit=self.weather.limit,
                        ranks=self.leader,
                        disk_writer=self._disk_writer(0),
                        task_status=task_status,
                    )
            except* (RankLost, RankDied):
                assert self.leader.lost.is_set()
            except* SimulatedCrash:
                self.died = True
            finally:  # Whatever it is, it must not be waited for.
                self.ranks[0].process.ended.set()
            with trio.fail_after(60):
                await self.follower.ended.wait()
                await trio.sleep(LAST_ERRORS_S + 1)
            processes.cancel_scope.cancel()

    async def _follow(self) -> None:
        await _quietly(self.follower.run())

    def die_reading(self, rank: int) -> None:
        """Rank 1, when its disk is asked to read for the so manieth time."""
        assert self.disks is not None
        if (
            rank == 1
            and self.fate.what == "dies reading"
            and self.disks.reads[1] > self.fate.step
            and not self.killed
        ):
            self.kill(self.ranks[1])

    async def _end_rank_0(self) -> None:
        """As `trouper serve` does: a moment for last words, then the process is gone. All were
        answered before."""
        await self.leader.lost.wait()
        self.lost = self.leader.reason
        await trio.sleep(LAST_ERRORS_S)
        for submission in self.submissions:
            assert submission.replies.statistics().open_send_channels == 0, (
                f"{submission} has no end"
            )
        self.kill(self.ranks[0])

    async def _end_rank_1(self) -> None:
        await self.follower.ended.wait()
        self.follower_said = self.follower.reason
        await trio.sleep(LAST_ERRORS_S)
        self.ranks[1].process.ended.set()

    def _check(self, runtime: Runtime) -> None:
        zero, one = self.ranks
        if not self.lost:
            super()._check(runtime)
            # Rank 0 was leaving already when it died; or never could go on.
            if self.killed or self.died:
                return
            # Rank 0 was leaving already. What a stopped process says here no real one could.
            if one.process.stopped:
                return
            assert self.follower_said == "", self.follower_said
            assert self.whole is False or zero.compared == one.compared, (
                "the ranks did not replay the same plans"
            )
            self._check_disk(runtime)
            return
        for client in self.clients:
            client.check()
        if self.weather.drain_at_s is None and self.fate.what != "dies first":
            assert not self.outcomes["engine_stopped"], "whose loss it is was not said"
        for submission in self.submissions:
            state = submission.replies.statistics()
            assert (state.open_send_channels, state.open_receive_channels) == (0, 0), submission
        assert self._expected() in self.lost, f"{self.fate}: {self.lost}"
        if self.fate.what == "dies first":
            assert "rank 0 is gone" in self.follower_said

    def _check_disk(self, runtime: Runtime) -> None:
        zero, one = self.ranks
        assert zero.loaded == one.loaded or not self.whole
        self.lacking = runtime.health().directory.lacking
        disk = self.follower._disk
        assert disk is not None
        read_bytes = sum(piece.nbytes for pieces in disk._reads.values() for piece in pieces or ())
        assert disk._read_bytes == read_bytes <= disk._capacity_bytes

    def _expected(self) -> str:
        return {
            "nothing": "nobody",
            "dies": "rank 1: its connection ended",
            "stops": "rank 1: it has been silent",
            "crashes": "rank 1 crashed: ZeroDivisionError: of rank 1",
            "drops a row": "rank 1 differs",
            "forgets a block": "its blocks are not what the plan expects",
            "dies first": "",
            "draws another token": "its tokens are not what the plan expects",
            "dies reading": "rank 1: its connection ended",
            "dies encoding": "rank 1: its connection ended",
            "forgets an image": "its images are not what the plan expects",
        }[self.fate.what]

    @property
    def outcomes(self) -> Counter[str]:
        loaded = self.ranks[1].loaded
        return super().outcomes + Counter(
            {"lost": bool(self.lost), "loaded from disk": loaded, "lacking": self.lacking}
        )


async def _quietly(work: Awaitable[None]) -> None:
    try:
        await work
    except* (RankLost, RankDied, CollectiveFailed, ZeroDivisionError):
        pass


def weather_of(chance: Random) -> Weather:
    """Of one rank, but for what is the ranks' own fate."""
    weather = Weather.draw(chance)
    settings = attrs.evolve(
        weather.settings,
        collective_timeout_s=LIMIT_S,
        rank_timeout_s=4.0,
        stall_timeout_s=STALL_TIMEOUT_S,
    )
    return attrs.evolve(weather, settings=settings, crash=0)


FATES: tuple[What, ...] = (
    "nothing",
    "nothing",
    "dies",
    "stops",
    "crashes",
    "drops a row",
    "forgets a block",
    "draws another token",
    "dies first",
)
IMAGE_FATES: tuple[What, ...] = ("dies encoding", "forgets an image")
IMAGE_FATES_SHARE = 0.3


def run_ranks_world(
    seed: int, fate: Fate | None = None, directory: Path | None = None
) -> RanksWorld:
    """Raises, whatever is wrong with it. `directory`: of its disks; None: it has none."""
    chance = Random(seed)
    drawn = Fate(chance.choice(FATES), chance.randrange(60), loud=seed % 2 == 1)
    weather, trace = weather_of(chance), list[Any]()
    if directory is not None:
        weather = with_disk(weather, directory)
    clients = [Client.draw(name, chance, weather) for name in range(CLIENTS)]
    pictures = Random(f"images of {seed}")
    weather, decoder = with_images(weather, ImageWeather.draw(pictures), clients, pictures)
    if decoder is not None and pictures.random() < IMAGE_FATES_SHARE:
        drawn = attrs.evolve(drawn, what=pictures.choice(IMAGE_FATES))
    world = RanksWorld(
        weather,
        SimEngine(weather, chance, trace),
        clients,
        trace,
        fate=fate or drawn,
        chance=chance,
        decoder=decoder,
    )
    world.engine = Rank(0, world, weather, chance, trace)
    if directory is not None:
        world.disks = SimDisks.draw(chance)
        world.disks.before_read = world.die_reading
    policy = Eager if weather.eager else Speculation
    with _watched(world.submissions), mock.patch.object(core_module, "Speculation", policy):
        run_seeded(seed, world.run)
    return world


def with_disk(weather: Weather, directory: Path) -> Weather:
    """And with so little memory that much is read again from there."""
    settings = attrs.evolve(
        weather.settings,
        no_ssd=False,
        ssd_cache_dir=directory,
        ssd_keep_free=ByteSize(0),
        cache_memory=ByteSize(30_000),
    )
    return attrs.evolve(weather, settings=settings)


def run_two_lives(seed: int, fate: Fate | None = None) -> tuple[RanksWorld, RanksWorld]:
    """The second with the same prompts, and what is left of the files of the first. `fate`: of the
    second; the first has none."""
    with tempfile.TemporaryDirectory() as place:
        first = run_ranks_world(seed, Fate(), Path(place))
        lose_files(Path(place), Random(seed))
        return first, run_ranks_world(seed, fate, Path(place))


def outcomes_of(seed: int) -> Counter[str]:
    first, second = run_two_lives(seed)
    return run_ranks_world(seed).outcomes + first.outcomes + second.outcomes


def main(worlds: int = 100, first: int = 0) -> int:
    return campaign("tests.sim.ranks", outcomes_of, worlds, first)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
