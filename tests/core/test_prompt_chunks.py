"""In how many steps a prompt is computed on an idle engine that prepares each new shape, whose
chunks are rounded."""

from __future__ import annotations

import pytest

from tests.core.driving import DrivenCore
from trouper.engine.passes.pass_shapes import CHUNK_STEP, LONE_WIDTHS

SLOW_S = 2.0


def chunks_of(driven: DrivenCore, length: int) -> list[int]:
    """Tokens of each step of one prompt, which nothing else runs with."""
    driven.arrive(length, max_tokens=2, seed=len(driven.clients) + 1)
    first = len(driven.plans)
    while driven.core.waiting or driven.core._batch.rows:
        driven.step()
    return [chunk.tokens for plan in driven.plans[first:] for chunk in plan.prefill]


@pytest.mark.parametrize("length", [90, 356, LONE_WIDTHS[-1]])
def test_a_short_prompt_takes_the_one_pass_that_was_prepared_for_it(length: int) -> None:
    """On an H100 356 tokens took 51 ms, in three passes (0.6B shape)."""
    driven = DrivenCore(chunk_step=CHUNK_STEP)
    assert chunks_of(driven, length) == [length]


@pytest.mark.parametrize("tokens", [600, 700, 1000, 1100])
def test_chunks_that_are_rounded_down_grow_again(tokens: int) -> None:
    """A rounded chunk has fewer tokens than were allowed, which was taken for the end of a prompt:
    chunks stayed as small as one slow moment had made them."""
    driven = DrivenCore(chunk_step=CHUNK_STEP, prefill_step_size=4096)
    driven.core._prefill_budget._sizers["text"].idle.tokens = tokens
    length = 3 * CHUNK_STEP + tokens * 3 // 4  # Its end is shorter than what is allowed, too.
    assert len(chunks_of(driven, length)) > 1
    assert chunks_of(driven, length) == [length]


def test_a_step_that_prepares_kernels_makes_no_chunk_smaller() -> None:
    driven = DrivenCore(chunk_step=CHUNK_STEP)
    longest = driven.settings.prefill_step_size
    for _ in range(4):
        chunks_of(driven, longest)
    driven.step_s, driven.preparing = SLOW_S, True
    for _ in range(4):
        assert chunks_of(driven, longest) == [longest]


def test_chunks_grow_while_each_step_prepares_kernels() -> None:
    driven = DrivenCore(chunk_step=CHUNK_STEP)
    driven.preparing = True
    longest = driven.settings.prefill_step_size
    for _ in range(4):
        chunks_of(driven, longest)
    assert chunks_of(driven, longest) == [longest]
