"""Worlds in which some requests, or some companies of requests, crash the engine: `python -m
tests.sim.crashes N [FIRST]`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, Literal
from unittest import mock

import attrs

from tests.campaign import campaign
from tests.fakes import Encoded, EngineDied, FakeRow
from tests.sim.clients import Client
from tests.sim.pictures import FILES, expanded, shown
from tests.sim.seeded import run_seeded
from tests.sim.weather import ImageWeather, SimEngine, Weather
from tests.sim.world import CLIENTS, Eager, World, _watched, with_images
from trouper import ChatPrompt, Runtime, TokenPrompt
from trouper.actors.runtime.supervision import RestartLimit
from trouper.actors.scheduling import core as core_module
from trouper.actors.scheduling.speculation_policy import Speculation
from trouper.protocol.plans import Plan
from trouper.protocol.problems import OutOfDeviceMemory

Fault = Literal[
    "a prompt",
    "a place in an answer",
    "two that decode",
    "a short prompt in company",
    "any two",
    "little memory",
    "an image",
]
FAULTS: tuple[Fault, ...] = (
    "a prompt",
    "a prompt",
    "a place in an answer",
    "two that decode",
    "a short prompt in company",
    "any two",
    "little memory",
)
OF_IMAGES = ImageWeather(
    illustrated=0.5, decode_s=(0.001, 0.3), faults=(), crash=0, image_cache=None
)
DEADLY_FILE = FILES[0]
"""An image that crashes the encoder."""
DEADLY_DIGESTS = {image.span.digest for image in expanded(shown([DEADLY_FILE]))[1]}
LITTLE = 40
"""Tokens of several rows for which there is memory. A row alone always has enough."""
DEADLY = ((250, 251, 252), (253, 254, 255, 253, 254, 255))
"""What prompts begin with that crash it."""
GUILTY_SHARE = 0.25
IMAGES_SHARE = 0.2
"""Of worlds whose fault is an image."""


def is_deadly(prompt: Sequence[int]) -> bool:
    return any(tuple(prompt[: len(mark)]) == mark for mark in DEADLY)


def dies(fault: Fault, rows: Sequence[FakeRow]) -> bool:
    match fault:
        case "a prompt":
            return any(is_deadly(row.prompt) for row in rows)
        case "a place in an answer":
            return any(is_deadly(row.prompt) and row.position == 3 for row in rows)
        case "two that decode":
            return sum(row.begun for row in rows) > 1
        case "a short prompt in company":
            return len(rows) > 1 and any(len(row.prompt) == 1 for row in rows)
        case "any two":
            return len(rows) > 1
        case "little memory":
            return len(rows) > 1 and sum(len(row.kv) for row in rows) > LITTLE
        case "an image":
            raise AssertionError("its encoder dies, not its row")


@attrs.define(eq=False)
class CrashWorld(World):
    """All that is left to go wrong is the fault; and the server bears it with the restart limit
    that it has by default."""

    fault: Fault = "a prompt"

    def _check(self, runtime: Runtime) -> None:
        super()._check(runtime)
        assert not self.died
        for client in self.clients:
            self._check_fate(client)
        guilty = {repr(one.request.prompt) for one in self.clients if self._is_guilty(one)}
        stats = runtime.health().scheduler.recovery
        assert stats.crashes == self.engine.crashes["group"] == runtime.health().actors[1].restarts
        if self.fault in ("a prompt", "a place in an answer", "an image"):
            assert stats.convicted <= 4 * len(guilty)
            assert stats.crashes <= 2 * stats.convicted + len(guilty), (
                "each is tried after one crash, and convicted by one"
            )
        else:
            assert stats.convicted == 0, "alone nobody crashes it"
        assert stats.allocation_failures == (stats.crashes if self.fault == "little memory" else 0)

    def _is_guilty(self, client: Client) -> bool:
        prompt = client.request.prompt
        if isinstance(prompt, ChatPrompt):
            return any(image.data == DEADLY_FILE for image in prompt.images)
        assert isinstance(prompt, TokenPrompt)
        return self.fault in ("a prompt", "a place in an answer") and is_deadly(prompt.tokens)

    def _check_fate(self, client: Client) -> None:
        if not self._is_guilty(client):
            assert client.outcome not in ("request_crashes_engine", "engine_stopped"), client
        elif self.fault in ("a prompt", "an image"):
            assert client.outcome not in ("stop", "length", "engine_stopped"), client

    @property
    def outcomes(self) -> Counter[str]:
        return super().outcomes + Counter(crashes=self.engine.crashes["group"])


class Faulty(SimEngine):
    """Crashes by its fault alone."""

    def __init__(self, fault: Fault, weather: Weather, chance: Random, trace: list[Any]) -> None:
        super().__init__(weather, chance, trace)
        self.fault = fault
        if fault != "an image":
            self.dies = self._dies
        if fault == "little memory":
            self.death = OutOfDeviceMemory

    def _dies(self, rows: Sequence[FakeRow]) -> bool:
        dead = dies(self.fault, rows)
        self.crashes["group"] += dead
        return dead

    def _encode(self, plan: Plan) -> Encoded:
        if any(order.span.digest in DEADLY_DIGESTS for order in plan.encode):
            self.crashes["group"] += 1
            raise EngineDied("in the encoder")
        return super()._encode(plan)


def weather_of(chance: Random) -> Weather:
    weather = Weather.draw(chance)
    return attrs.evolve(
        weather,
        limit=RestartLimit(),
        crash=0,
        hang=0,
        poison=0,
        janitor_crash=0,
        drain_at_s=None,
        drain_s=1000,
    )


def guilty_client(client: Client, chance: Random) -> Client:
    """One of few prompts, so that the same is sent again and again."""
    mark = chance.choice(DEADLY)
    prompt = TokenPrompt(mark + tuple(range(chance.choice((0, 1, 50)))))
    client.request = attrs.evolve(client.request, prompt=prompt)
    return client


def run_crash_world(seed: int) -> CrashWorld:
    """Raises, whatever is wrong with it."""
    chance = Random(seed)
    fault, pictures = chance.choice(FAULTS), Random(f"images of {seed}")
    if pictures.random() < IMAGES_SHARE:
        fault = "an image"
    weather, trace = weather_of(chance), list[Any]()
    clients = [Client.draw(name, chance, weather) for name in range(CLIENTS)]
    if fault in ("a prompt", "a place in an answer"):
        clients = [
            guilty_client(one, chance) if chance.random() < GUILTY_SHARE else one for one in clients
        ]
    images = OF_IMAGES if fault == "an image" else None
    weather, decoder = with_images(weather, images, clients, pictures)
    engine = Faulty(fault, weather, chance, trace)
    world = CrashWorld(weather, engine, clients, trace, decoder=decoder, fault=fault)
    policy = Eager if weather.eager else Speculation
    with _watched(world.submissions), mock.patch.object(core_module, "Speculation", policy):
        run_seeded(seed, world.run)
    return world


def main(worlds: int = 100, first: int = 0) -> int:
    return campaign("tests.sim.crashes", lambda seed: run_crash_world(seed).outcomes, worlds, first)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
