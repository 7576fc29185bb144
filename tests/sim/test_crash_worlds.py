"""Worlds in which requests, or companies of them, crash the engine; `just sim-crashes N` runs
more."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.sim.crashes import FAULTS, CrashWorld, run_crash_world


@cache
def first(seed: int) -> CrashWorld:
    """The world of a seed, run once for all tests here."""
    return run_crash_world(seed)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.long(but=("?", "1?"))
def test_whoever_is_innocent_has_its_answer(seed: int) -> None:
    first(seed)


def test_the_same_seed_is_the_same_world() -> None:
    for seed in range(4):
        assert first(seed).trace == run_crash_world(seed).trace


def test_the_worlds_meet_every_fault() -> None:
    """A world where nothing crashes proves nothing about crashes."""
    worlds = [first(seed) for seed in range(40)]
    crashes = Counter[str]()
    for world in worlds:
        crashes[world.fault] += world.engine.crashes["group"]
    assert min(crashes[fault] for fault in (*FAULTS, "an image")) >= 2
    met = {outcome for world in worlds for outcome in world.outcomes}
    assert met >= {"stop", "length", "left", "stalled", "request_crashes_engine"}
    assert sum(world.outcomes["stop"] + world.outcomes["length"] for world in worlds) > 200
