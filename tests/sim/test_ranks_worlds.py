"""Two ranks under a virtual clock; `just sim-ranks N` runs more worlds."""

from __future__ import annotations

import pytest

from tests.family_configs import LONG
from tests.sim.ranks import FATES, Fate, What, run_ranks_world, run_two_lives


@pytest.mark.parametrize("seed", [*range(14), 68, 337])
@pytest.mark.long(but=("?", "68", "337"))
def test_f19_f20_f24_f27_everybody_is_answered_whatever_becomes_of_a_rank(seed: int) -> None:
    """D12: also those whose engine waits in a collective for ever. Tokens are those of one rank;
    who differs is named."""
    run_ranks_world(seed)


STEPS = 10


@pytest.mark.parametrize("step", range(STEPS))
def test_f27_a_rank_may_die_at_any_step(step: int) -> None:
    assert "rank 1" in run_ranks_world(3, Fate("dies", step)).lost


@pytest.mark.parametrize("seed", [9, 10])
def test_f27_whose_loss_it_is_is_said_though_the_collective_fails_first(seed: int) -> None:
    """Clients were told `engine_stopped` when rank 0's engine raised before its link ended."""
    assert run_ranks_world(seed, Fate("dies", 5, loud=True)).outcomes["rank_lost"]


@pytest.mark.parametrize("what", sorted(set(FATES) - {"nothing"}))
def test_the_fates_are_met(what: What) -> None:
    """A world where nothing is found proves nothing about finding it."""
    assert any(run_ranks_world(seed, Fate(what, 5)).lost for seed in (3, 8, 11))


WITH_IMAGES = (10, 12, 14)


@pytest.mark.parametrize("seed", WITH_IMAGES)
def test_images_are_encoded_by_rank_0_and_shared(seed: int) -> None:
    world = run_ranks_world(seed, Fate())
    zero, one = world.ranks
    assert zero.num_encoded == one.num_encoded > 0


@pytest.mark.parametrize("seed", WITH_IMAGES)
def test_f27_a_rank_may_die_while_an_image_is_encoded(seed: int) -> None:
    world = run_ranks_world(seed, Fate("dies encoding", 0))
    assert world.lost == "rank 1: its connection ended"
    assert world.outcomes["rank_lost"]


def test_f20_a_rank_that_has_lost_an_image_is_named_before_the_collective() -> None:
    worlds = [run_ranks_world(seed, Fate("forgets an image", 0)) for seed in WITH_IMAGES]
    assert any("its images are not what the plan expects" in world.lost for world in worlds)


def test_the_same_seed_is_the_same_world() -> None:
    assert run_ranks_world(4).trace == run_ranks_world(4).trace


# -- with a disk ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12 if LONG else 4))
def test_r4_f27_two_lives_with_disks_that_fail_or_hang(seed: int) -> None:
    """F9: what one rank has lost between them is computed. D9: or what is damaged. Nobody waits for
    a disk for ever, and each rank gets its own shard."""
    run_two_lives(seed)


def test_f27_a_rank_may_die_while_it_reads() -> None:
    worlds = [run_two_lives(seed, Fate("dies reading", 0))[1] for seed in (8, 13, 16)]
    assert all("rank 1: its connection ended" in world.lost for world in worlds)


def test_the_disks_are_of_use_and_met_their_fates() -> None:
    worlds = [world for seed in (0, 1) for world in run_two_lives(seed, Fate())]
    assert sum(world.ranks[1].loaded for world in worlds) > 10
    assert sum(world.lacking for world in worlds) > 0
