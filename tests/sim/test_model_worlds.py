"""Several models in 9 worlds, 60 in the long version."""

from __future__ import annotations

from functools import cache

import pytest

from tests.family_configs import LONG
from tests.sim.models import World, run_world

SEEDS = range(60 if LONG else 9)


@cache
def first(seed: int) -> World:
    return run_world(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_when_all_have_ended_nothing_is_held_for_anybody(seed: int) -> None:
    first(seed)


def test_the_worlds_meet_every_fate() -> None:
    met = {outcome for seed in SEEDS for outcome in first(seed).outcomes}
    assert met >= {"answered", "left", "cancelled", "abort", "refused", "adapter_not_found"}
