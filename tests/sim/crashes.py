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
from tests.fakes import FakeRow
from tests.sim.clients import Client
from tests.sim.seeded import run_seeded
from tests.sim.weather import SimEngine, Weather
from tests.sim.world import CLIENTS, Eager, World, _watched
from trouper import Runtime, TokenPrompt
from trouper.actors.runtime.supervision import RestartLimit
from trouper.actors.scheduling import core as core_module
from trouper.actors.scheduling.speculation_policy import Speculation
from trouper.protocol.problems import OutOfDeviceMemory

Fault = Literal[
    "a prompt",
    "a place in an answer",
    "two that decode",
    "a short prompt in company",
    "any two",
    "little memory",
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
LITTLE = 40
"""Tokens of several rows for which there is memory. A row alone always has enough."""
DEADLY = ((250, 251, 252), (253, 254, 255, 253, 254, 255))
"""What prompts begin with that crash it."""
GUILTY_SHARE = 0.25


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
        guilty = {client.request.prompt for client in self.clients if self._is_guilty(client)}
        stats = runtime.health().scheduler.recovery
        assert stats.crashes == self.engine.crashes["group"] == runtime.health().actors[1].restarts
        if self.fault in ("a prompt", "a place in an answer"):
            assert stats.convicted <= 4 * len(guilty)
            assert stats.crashes <= 2 * stats.convicted + len(guilty), (
                "each is tried after one crash, and convicted by one"
            )
        else:
            assert stats.convicted == 0, "alone nobody crashes it"
        assert stats.allocation_failures == (stats.crashes if self.fault == "little memory" else 0)

    def _is_guilty(self, client: Client) -> bool:
        assert isinstance(client.request.prompt, TokenPrompt)
        return self.fault in ("a prompt", "a place in an answer") and is_deadly(
            client.request.prompt.tokens
        )

    def _check_fate(self, client: Client) -> None:
        if not self._is_guilty(client):
            assert client.outcome not in ("request_crashes_engine", "engine_stopped"), client
        elif self.fault == "a prompt":
            assert client.outcome not in ("stop", "length", "engine_stopped"), client

    @property
    def outcomes(self) -> Counter[str]:
        return super().outcomes + Counter(crashes=self.engine.crashes["group"])


class Faulty(SimEngine):
    """Crashes by its fault alone."""

    def __init__(self, fault: Fault, weather: Weather, chance: Random, trace: list[Any]) -> None:
        super().__init__(weather, chance, trace)
        self.fault = fault
        self.dies = self._dies
        if fault == "little memory":
            self.death = OutOfDeviceMemory

    def _dies(self, rows: Sequence[FakeRow]) -> bool:
        dead = dies(self.fault, rows)
        self.crashes["group"] += dead
        return dead


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
    fault = chance.choice(FAULTS)
    weather, trace = weather_of(chance), list[Any]()
    clients = [Client.draw(name, chance, weather) for name in range(CLIENTS)]
    if fault in ("a prompt", "a place in an answer"):
        clients = [
            guilty_client(one, chance) if chance.random() < GUILTY_SHARE else one for one in clients
        ]
    world = CrashWorld(weather, Faulty(fault, weather, chance, trace), clients, trace, fault=fault)
    policy = Eager if weather.eager else Speculation
    with _watched(world.submissions), mock.patch.object(core_module, "Speculation", policy):
        run_seeded(seed, world.run)
    return world


def main(worlds: int = 100, first: int = 0) -> int:
    return campaign("tests.sim.crashes", lambda seed: run_crash_world(seed).outcomes, worlds, first)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
