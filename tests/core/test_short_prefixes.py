"""Cached prefixes that are shorter than what restoring costs (`ModelCard.min_restored_tokens`)."""

from __future__ import annotations

import pytest

from tests.core.driving import DrivenCore
from tests.fakes import UNCUTTABLE
from trouper.protocol.plans import Admit


def admitted_after(core: DrivenCore, shared: int, *, at_once: bool = False) -> Admit:
    """The admission of a prompt that shares its first tokens with an earlier one, which has ended,
    or with `at_once` decodes."""
    prefix = tuple(range(1, shared + 1))
    core.arrive(shared + 20, 500 if at_once else 4, prefix=prefix)
    core.until_decoding()
    for _ in range(4 if at_once else 12):
        core.step()
    core.arrive(shared + 30, 4, seed=1, prefix=prefix)
    core.until_decoding()
    return [admit for plan in core.plans for admit in plan.admit][-1]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("minimum", "shared", "restored"), [(0, 40, 40), (64, 40, 0), (64, 63, 0), (64, 64, 64)]
)
def test_a_short_prefix_is_computed_again(
    minimum: int, shared: int, restored: int, *, at_once: bool
) -> None:
    core = DrivenCore(disk=False, block_size=16, min_restored_tokens=minimum)
    admit = admitted_after(core, shared, at_once=at_once)
    assert (admit.restore.tokens if admit.restore else 0) == restored
    assert core.watches.stats.latest.total_cached_tokens == restored


@pytest.mark.parametrize("minimum", [0, 64])
def test_where_prompts_depart_a_snapshot_is_taken(minimum: int) -> None:
    """Although nothing is restored there yet."""
    core, prefix = (
        DrivenCore(UNCUTTABLE, disk=False, block_size=16, min_restored_tokens=minimum),
        tuple(range(1, 101)),
    )
    for seed in range(3):
        core.arrive(110, 4, seed=seed, prefix=prefix)
        core.until_decoding()
        for _ in range(12):
            core.step()
    assert [
        admit.restore.tokens if admit.restore else 0 for plan in core.plans for admit in plan.admit
    ] == [0, 0, 100]
