"""The whole graph in 46 worlds, 100 in the long version; `just sim N` runs more."""

from __future__ import annotations

from functools import cache

import pytest

from tests.family_configs import LONG
from tests.sim.world import World, run_world

SEEDS = range(100 if LONG else 46)


@cache
def first(seed: int) -> World:
    """The world of a seed, run once for all tests here."""
    return run_world(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_client_that_stays_meets_one_end_and_nothing_leaks(seed: int) -> None:
    first(seed)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.long(but=("0", "5", "9"))
def test_the_same_seed_is_the_same_world(seed: int) -> None:
    assert first(seed).trace == run_world(seed).trace


def test_the_worlds_meet_every_fate() -> None:
    """A world where nobody is cut off proves nothing about being cut off."""
    worlds = [first(seed) for seed in SEEDS]
    assert (
        0
        < sum(world.drafts.accepted for world in worlds)
        < sum(world.drafts.drafted for world in worlds)
    )
    assert sum(world.drafts.accepted > 20 for world in worlds) > 10
    met = {outcome for world in worlds for outcome in world.outcomes}
    assert met >= {
        "stop",
        "length",
        "left",
        "stalled",
        "queue_full",
        "queue_timeout",
        "first_token_timeout",
        "token_timeout",
        "request_timeout",
        "engine_stopped",
        "intake_failed",
        "draining",
        "device_stuck",
        "died",
        "image_damaged",
        "image_crashes_decoder",
        "image_decoder_unavailable",
        "decoded",
        "encoded",
        "decoder crashed",
        "drained amid a decode",
    }
