"""One simulated world: the whole graph, a fake engine, 40 clients, one seed. Virtual time, so it
takes milliseconds."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import attrs
import trio

from tests.sim.clients import Client
from tests.sim.pictures import SimDecoder
from tests.sim.seeded import run_seeded
from tests.sim.weather import ImageWeather, SimEngine, Weather
from trouper import Answer, Runtime, TokenPrompt
from trouper.actors import graph
from trouper.actors.graph import run_graph
from trouper.actors.image_decoder import decode_images
from trouper.actors.runtime import runtime as runtime_module
from trouper.actors.runtime.submission import Submission, open_submission
from trouper.actors.scheduling import core as core_module
from trouper.actors.scheduling.speculation_policy import Allowed, Drafter, Speculation
from trouper.protocol.health import SpeculationStats
from trouper.protocol.plans import ProposerName
from trouper.protocol.problems import ActorFailed
from trouper.protocol.replies import Failed, Finished, Reply
from trouper.protocol.setting_fields import ByteSize

CLIENTS = 40
TOO_LONG_S = 10_000
NGRAM: ProposerName = "ngram"


class Eager(Speculation):
    """Everybody drafts as much as there is room for, whatever it costs: what is measured on a
    virtual clock seldom pays."""

    def allow(self, rows: Sequence[Drafter]) -> Allowed:
        """By each of a row's proposers in turn."""
        most = max(self._sizes)
        drafts = tuple(max(0, min(most, row.room)) if row.records else 0 for row in rows)
        if not any(drafts):
            return Allowed(watch=True)
        self._turn = getattr(self, "_turn", 0) + 1
        named = [[*row.records] or [NGRAM] for row in rows]
        proposers = tuple(
            names[(self._turn + place) % len(names)] for place, names in enumerate(named)
        )
        return Allowed(drafts, proposers if {*proposers} != {NGRAM} else (), watch=True)


@attrs.define(eq=False)
class World:
    weather: Weather
    engine: SimEngine
    clients: list[Client]
    trace: list[Any]
    submissions: list[Submission] = attrs.field(factory=list)
    drafts: SpeculationStats = attrs.field(factory=SpeculationStats)
    whole: bool = False
    """Everybody was answered before the graph ended."""
    decoder: SimDecoder | None = None
    died: bool = False
    """Too many crashes: the graph ended by itself."""

    async def run(self) -> None:
        with trio.fail_after(TOO_LONG_S):
            async with trio.open_nursery() as outer:
                runtime: Runtime = await outer.start(self._graph)
                async with trio.open_nursery() as stalled:
                    await self._until_drained(runtime, stalled)
                    for client in self.clients:
                        await client.settled.wait()
                    self._check_stalled()
                    stalled.cancel_scope.cancel()
        self._check(runtime)

    async def _graph(self, *, task_status: trio.TaskStatus[Runtime]) -> None:
        decode = partial(decode_images, process=self.decoder)
        try:
            with mock.patch.object(graph, "decode_images", decode):
                await run_graph(
                    self.weather.settings,
                    self.engine,
                    limit=self.weather.limit,
                    task_status=task_status,
                )
        except* ActorFailed:
            self.died = True

    async def _until_drained(self, runtime: Runtime, stalled: trio.Nursery) -> None:
        async with trio.open_nursery() as others:
            for client in self.clients:
                nursery = others if client.stalls_after == float("inf") else stalled
                nursery.start_soon(client.live, runtime, self.trace)
            if self.weather.drain_at_s is not None:
                await trio.sleep(self.weather.drain_at_s)
                if self.decoder is not None and self.decoder.busy:
                    self.decoder.met["drained amid a decode"] += 1
                self._note_drained(await runtime.drain(self.weather.drain_s))
        if self.weather.drain_at_s is None:
            self._note_drained(await runtime.drain(self.weather.drain_s))

    def _note_drained(self, whole: bool) -> None:
        self.whole = whole
        self.trace.append((trio.current_time(), "drained", whole))

    def _check_stalled(self) -> None:
        """Nothing was lost on who never read: the whole answer lies there, with one end."""
        for client in self.clients:
            if client.stalled is None or client.outcome != "stalled":
                continue
            waiting = list(_what_waits(client.stalled))
            assert isinstance(waiting[-1], Finished | Failed), (client, waiting)
            assert not any(isinstance(reply, Finished | Failed) for reply in waiting[:-1]), (
                client,
                waiting,
            )

    def _check(self, runtime: Runtime) -> None:
        for client in self.clients:
            client.check()
        assert runtime.finished.is_set()
        assert not self.engine.rows
        for submission in self.submissions:
            state = submission.replies.statistics()
            assert (state.open_send_channels, state.open_receive_channels) == (0, 0), submission
        stats = runtime.health().scheduler
        assert (stats.active_sequences, stats.queued_requests, stats.prefilling_sequences) == (
            0,
            0,
            0,
        ), stats
        if self.whole and not self.died and not self.engine.crashes:
            assert self.engine.held == (stats.cache.blocks, stats.cache.snapshots), stats.cache
            assert self.engine.held_images == (0, stats.image_cache_bytes), "an image is left"
        assert stats.cache.bytes <= stats.cache.capacity_bytes
        self.drafts = stats.speculation
        assert self.drafts.accepted == sum(self.drafts.accepted_at) <= self.drafts.drafted
        ended = stats.requests_completed + stats.requests_errored + stats.requests_withdrawn
        assert stats.total_requests == ended, stats
        intake, group, janitor, writer, *decoders = (
            actor.restarts for actor in runtime.health().actors
        )
        crashes = [] if self.decoder is None else [self.decoder.met["decoder crashed"]]
        assert decoders == crashes
        assert (intake, group) == (0, self.engine.crashes["group"])
        assert (janitor, writer) == (self.engine.crashes["janitor"], 0)

    @property
    def outcomes(self) -> Counter[str]:
        met = Counter() if self.decoder is None else self.decoder.met
        counted = Counter(died=self.died, encoded=self.engine.num_encoded)
        return Counter(client.outcome for client in self.clients) + counted + met


def _what_waits(answer: Answer) -> Iterator[Reply]:
    yield from answer._unread
    while True:
        try:
            yield answer._replies.receive_nowait()
        except trio.EndOfChannel:
            return


@contextmanager
def _watched(submissions: list[Submission]) -> Iterator[None]:
    """Remember every reply channel that is opened; keep the crashes that we cause out of the
    log."""

    def remember(*arguments: Any) -> tuple[Submission, trio.MemoryReceiveChannel[Reply]]:
        submission, replies = open_submission(*arguments)
        submissions.append(submission)
        return submission, replies

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with mock.patch.object(runtime_module, "open_submission", remember):
            yield
    finally:
        logging.disable(before)


def with_images(
    weather: Weather, images: ImageWeather | None, clients: Sequence[Client], chance: Random
) -> tuple[Weather, SimDecoder | None]:
    """Give a world images, by draws of their own: the rest of it stays as it is without."""
    if images is None:
        return weather, None
    for client in clients:
        if isinstance(client.request.prompt, TokenPrompt) and chance.random() < images.illustrated:
            client.illustrate(chance)
    image_cache = None if images.image_cache is None else ByteSize(images.image_cache)
    settings = attrs.evolve(weather.settings, image_cache=image_cache)
    weather = attrs.evolve(weather, images=images, settings=settings)
    return weather, SimDecoder(images, chance)


def run_world(seed: int) -> World:
    """Raises, whatever is wrong with it."""
    chance = Random(seed)
    weather, trace = Weather.draw(chance), list[Any]()
    clients = [Client.draw(name, chance, weather) for name in range(CLIENTS)]
    pictures = Random(f"images of {seed}")
    weather, decoder = with_images(weather, ImageWeather.draw(pictures), clients, pictures)
    world = World(weather, SimEngine(weather, chance, trace), clients, trace, decoder=decoder)
    policy = Eager if weather.eager else Speculation
    with _watched(world.submissions), mock.patch.object(core_module, "Speculation", policy):
        run_seeded(seed, world.run)
    return world
