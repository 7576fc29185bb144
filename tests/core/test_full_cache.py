"""A cache without room: rows that decode do not ask it for some in each step."""

from __future__ import annotations

import statistics

import pytest

from tests.core.driving import DrivenCore, bytecodes_of_steps
from trouper.actors.scheduling.row_storing import TAIL_TOKENS
from trouper.protocol.setting_fields import ByteSize

ROWS, PROMPT, BLOCK = 8, 60, 64


def decoding(cache_bytes: int, block_size: int = BLOCK) -> DrivenCore:
    """A core whose rows have decoded more tokens than are stored together."""
    core = DrivenCore(
        disk=False,
        cache_memory=ByteSize(cache_bytes),
        block_size=block_size,
        completion_batch_size=ROWS,
    )
    for seed in range(ROWS):
        core.arrive(PROMPT, 4096, seed=seed)
    core.until_decoding()
    for _ in range(2 * TAIL_TOKENS):
        core.step()
    return core


def step_bytecodes(core: DrivenCore) -> float:
    return statistics.median(bytecodes_of_steps(core, 20))


@pytest.mark.parametrize("cache_bytes", [0, 20_000])
def test_a_step_costs_no_more_where_the_cache_has_no_room(cache_bytes: int) -> None:
    """The cache of 20,000 bytes has room for some of the rows' blocks."""
    assert step_bytecodes(decoding(cache_bytes)) <= 1.02 * step_bytecodes(decoding(2**34))


def test_a_step_costs_no_more_where_no_block_is_full_yet() -> None:
    assert step_bytecodes(decoding(2**34, block_size=1024)) <= 1.02 * step_bytecodes(
        decoding(2**34)
    )


def test_blocks_are_stored_once_there_is_room_again() -> None:
    """Behind a row whose blocks fill the cache, and which has ended, another one stores its own,
    from their beginning."""
    core = DrivenCore(
        disk=False,
        cache_memory=ByteSize(100 * 10 * BLOCK),
        block_size=BLOCK,
        completion_batch_size=2,
    )
    core.arrive(8 * BLOCK, 2 * TAIL_TOKENS - 100)
    core.arrive(PROMPT, 4096, seed=1)
    core.until_decoding()
    other = max(core.core._batch.rows)
    for _ in range(4 * TAIL_TOKENS):
        core.step()
    starts = [store.start for plan in core.plans for store in plan.store if store.row == other]
    assert starts[0] == 0
