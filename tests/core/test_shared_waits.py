"""Prompts that arrive together and share a beginning too short for one of them to wait for: the
core with an engine that answers at once."""

from __future__ import annotations

from tests.core.driving import DrivenCore
from trouper.protocol.plans import Chunk

SHARED = tuple(range(1, 25))


def measured_core() -> DrivenCore:
    """A core that has measured: decode steps take as long as the prefill of more tokens than two
    prompts share."""
    core = DrivenCore(
        disk=False, prefill_batch_size=32, completion_batch_size=33, prefill_step_size=2048
    )
    core.arrive(200, 400, seed=99)
    core.until_decoding()
    for _ in range(40):
        core.step()
    assert core.core._admission._worth_waiting() > 2 * len(SHARED)
    return core


def prefilled(core: DrivenCore, prompts: list[tuple[int, ...]]) -> list[Chunk]:
    """Chunks until all prompts are computed."""
    before = len(core.plans)
    for prompt in prompts:
        core.arrive(len(prompt), 1, prefix=prompt)
    for _ in range(60):
        core.step()
    return [chunk for plan in core.plans[before:] for chunk in plan.prefill]


def test_many_wait_for_what_is_not_worth_it_for_one() -> None:
    prompts = [(*SHARED, *range(number, number + 60, 5)) for number in range(41, 41 + 20)]
    chunks = prefilled(measured_core(), prompts)
    assert sum(chunk.tokens for chunk in chunks) == len(SHARED) + 12 * len(prompts)


def test_two_do_not_wait_for_what_is_worth_it_for_many() -> None:
    prompts = [(*SHARED, *range(number, number + 60, 5)) for number in (41, 42)]
    chunks = prefilled(measured_core(), prompts)
    assert sum(chunk.tokens for chunk in chunks) == 2 * (len(SHARED) + 12)


def test_who_shares_little_more_waits_where_others_do() -> None:
    """The primary pauses once, not again for the two tokens that some of them share beyond."""
    core = measured_core()
    prompts = [
        (*SHARED, 41, 42 + number % 2, *range(50 + number, 90 + number, 4)) for number in range(20)
    ]
    prompts[1] = (*SHARED, *range(60, 72))
    chunks = prefilled(core, prompts)
    primary = [chunk.tokens for chunk in chunks if chunk.row == chunks[0].row]
    assert primary[0] == len(SHARED)
    assert sum(chunk.tokens for chunk in chunks) == len(SHARED) + 12 * len(prompts)
    assert len({chunk.row for chunk in chunks}) == len(prompts)
