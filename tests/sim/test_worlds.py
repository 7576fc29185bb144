"""The whole graph in a hundred worlds; `just sim N` runs more."""

from __future__ import annotations

import pytest

from tests.sim.world import run_world


@pytest.mark.parametrize("seed", range(100))
def test_every_client_that_stays_meets_one_end_and_nothing_leaks(seed: int) -> None:
    run_world(seed)


@pytest.mark.parametrize("seed", range(10))
def test_the_same_seed_is_the_same_world(seed: int) -> None:
    assert run_world(seed).trace == run_world(seed).trace


def test_the_worlds_meet_every_fate() -> None:
    """A world where nobody is cut off proves nothing about being cut off."""
    met = {outcome for seed in range(100) for outcome in run_world(seed).outcomes}
    assert met >= {
        "stop", "length", "left", "stalled", "queue_full", "queue_timeout", "first_token_timeout", "token_timeout",
        "request_timeout", "engine_stopped", "intake_failed", "draining", "device_stuck", "died",
    }  # fmt: skip
