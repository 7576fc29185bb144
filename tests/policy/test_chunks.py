"""How much prompt one step prefills, and whose."""

from __future__ import annotations

import random

from hypothesis import assume, example, given
from hypothesis import strategies as st

from trouper.actors.scheduling.prefill_budget import (
    MIN_LONE_TOKENS,
    ChunkSizer,
    free_rows,
    round_chunk,
    share_chunks,
    take_turns,
)
from trouper.protocol.plans import RowId

COSTS = st.floats(1e-6, 0.01)


@given(fixed_s=st.floats(0, 0.15), per_token_s=COSTS, most=st.integers(1, 4096))
def test_d6_the_stall_bound_is_met_and_nearly_used(
    fixed_s: float, per_token_s: float, most: int
) -> None:
    """For any device whose step costs something fixed (decode, launch) and something per token."""
    sizer = ChunkSizer(0.2, most)
    for _ in range(100):
        sizer.measured(sizer.tokens, fixed_s + per_token_s * sizer.tokens)
        assert 1 <= sizer.tokens <= most
    settled = fixed_s + per_token_s * sizer.tokens
    assert settled <= 0.2 * 1.01 or sizer.tokens == sizer.min_tokens
    one_more = sizer.tokens / (sizer.tokens + 1)
    assert sizer.tokens == most or settled >= 0.2 * 0.9 * one_more * 0.999, (
        "nine tenths of the bound, up to one token"
    )


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 100)), max_size=50), st.integers(1, 4096)
)
@example([(1, 1.0)], 1)
@example([], 4)
def test_it_never_starves_and_never_exceeds_the_most(
    steps: list[tuple[int, float]], most: int
) -> None:
    sizer = ChunkSizer(0.2, most)
    assert 1 <= sizer.tokens <= most
    for tokens, seconds in steps:
        sizer.measured(tokens, seconds)
        assert 1 <= sizer.tokens <= most


@given(COSTS, COSTS)
def test_it_follows_a_device_that_changes_its_speed(before_s: float, after_s: float) -> None:
    sizer = ChunkSizer(0.2, 4096)
    for per_token_s in [before_s] * 50 + [after_s] * 50:
        sizer.measured(sizer.tokens, per_token_s * sizer.tokens)
    assert after_s * sizer.tokens <= 0.2 * 1.01 or sizer.tokens == sizer.min_tokens
    assert sizer.tokens >= min(4096, int(0.2 / after_s * 0.5))


@given(st.integers(1, 999), st.floats(1e-4, 0.19))
@example(3, 0.001)
def test_a_short_prompts_step_says_nothing_of_longer_chunks(tokens: int, seconds: float) -> None:
    sizer = ChunkSizer(0.2, 4096, tokens=1000)
    sizer.measured(tokens, seconds)
    assert sizer.tokens == 1000


@given(st.integers(1, 1000), st.floats(0.3, 1000))
def test_one_step_halves_a_chunk_at_most(tokens: int, seconds: float) -> None:
    """A remainder of a prompt, or noise, says little about the whole chunk."""
    sizer = ChunkSizer(0.2, 4096, tokens=1000)
    sizer.measured(tokens, seconds)
    assert 500 <= sizer.tokens < 1000


def test_one_slow_step_is_not_believed_and_two_are() -> None:
    """On an H200 one step that prepared a new shape (7 s) halved chunks again and again, until each
    had a shape of its own and was slow for that: 32 prompts of 50 tokens took 50 s."""
    sizer = ChunkSizer(0.2, 4096, tokens=1000)
    for seconds in (0.15, 7.0, 0.15, 7.0):
        sizer.measured(1000, seconds)
        assert sizer.tokens >= 1000
    sizer.measured(1000, 7.0)
    assert sizer.tokens < 1000


def test_a_prompt_that_grows_keeps_the_bound_of_streams() -> None:
    """A token costs more behind a longer context, and two steps are planned before one is measured:
    steps took 0.75 s in place of 0.3 in the first 4,000 tokens of a prompt."""
    sizer, at, planned, longest = ChunkSizer(0.225, 2048), 0, list[tuple[int, int]](), 0.0
    while at < 20_000:
        tokens = sizer.tokens_behind(at)
        at += tokens
        planned.append((tokens, at))
        if len(planned) == 2:
            tokens, end = planned.pop(0)
            seconds = 0.02 + tokens * 2.4e-7 * end
            longest = max(longest, seconds)
            sizer.measured(tokens, seconds, limited=True, end=end)
    assert longest < 0.3


@given(st.integers(0, 10**6))
def test_a_short_prompt_says_nothing_of_a_longer_one_where_there_is_time(context: int) -> None:
    sizer = ChunkSizer(0.2, 4096, tokens=1000)
    sizer.measured(20, 0.001, end=20)
    assert sizer.tokens_behind(0) == 1000
    assert 16 <= sizer.tokens_behind(context) <= 1000


REMAINING = st.lists(st.integers(1, 3000), min_size=1, max_size=12)


@given(REMAINING, st.integers(0, 4096), st.integers(1, 4096))
def test_r1_every_prompt_gets_on(wanted: list[int], budget: int, most: int) -> None:
    rows = [(RowId(n), tokens) for n, tokens in enumerate(wanted)]
    chunks = share_chunks(rows, budget, most)
    assert [chunk.row for chunk in chunks] == [row for row, _ in rows]
    assert all(
        1 <= chunk.tokens <= min(tokens, most)
        for chunk, (_, tokens) in zip(chunks, rows, strict=True)
    )
    assert sum(chunk.tokens for chunk in chunks) <= max(budget, len(rows))


@given(REMAINING, st.integers(0, 4096))
def test_the_budget_is_used_in_equal_parts(wanted: list[int], budget: int) -> None:
    """What is left of it is less than one token for each row that wants more."""
    chunks = share_chunks(
        [(RowId(n), tokens) for n, tokens in enumerate(wanted)], budget, max_tokens=4096
    )
    left = min(max(budget, len(wanted)), sum(wanted)) - sum(chunk.tokens for chunk in chunks)
    unfinished = [
        chunk.tokens for chunk, tokens in zip(chunks, wanted, strict=True) if chunk.tokens < tokens
    ]
    assert 0 <= left < max(1, len(unfinished))
    assert len(set(unfinished)) <= 1, "the others would be padded"


@given(REMAINING, st.integers(0, 4096))
def test_a_short_prompt_does_not_wait_behind_a_long_one(wanted: list[int], budget: int) -> None:
    """Whoever gets less than another has got all that it wanted, up to rounding."""
    chunks = share_chunks(
        [(RowId(n), tokens) for n, tokens in enumerate(wanted)], budget, max_tokens=4096
    )
    largest = max(chunk.tokens for chunk in chunks)
    for chunk, tokens in zip(chunks, wanted, strict=True):
        assert chunk.tokens == tokens or chunk.tokens >= largest - 1


@given(REMAINING, st.integers(0, 4096), st.integers(-1, 12))
def test_lone_passes_are_few(wanted: list[int], budget: int, last: int) -> None:
    """Each chosen row gets a chunk of a useful size, or all that it wants; one row always gets
    on."""
    chosen = take_turns(
        [(RowId(n), tokens) for n, tokens in enumerate(wanted)], budget, RowId(last)
    )
    chunks = share_chunks(chosen, budget, max_tokens=4096)
    assert chunks
    if len(chunks) > 1:
        assert all(chunk.tokens >= min(wanted[chunk.row], MIN_LONE_TOKENS) for chunk in chunks)


@given(REMAINING, st.integers(0, 1000))
def test_every_row_has_its_turn(wanted: list[int], budget: int) -> None:
    """Within as many steps as there are rows each row gets a chunk."""
    rows, last, served = (
        [(RowId(n), tokens) for n, tokens in enumerate(wanted)],
        RowId(-1),
        set[RowId](),
    )
    for _ in rows:
        chosen = take_turns(rows, budget, last)
        served |= {row for row, _ in chosen}
        last = chosen[-1][0]
    assert len(served) == len(rows)


SMALL = st.integers(0, 40)


@given(SMALL, SMALL, st.integers(1, 40), st.integers(1, 8))
def test_rows_enter_while_there_is_room(
    admitted: int, prefilling: int, rows: int, prefill_rows: int
) -> None:
    assume(prefilling <= admitted)
    free = free_rows(admitted, prefilling, rows, prefill_rows, under_pressure=False)
    assert 0 <= free <= prefill_rows
    assert free == 0 or admitted + free <= rows
    assert free == 0 or prefilling + free <= prefill_rows
    assert free_rows(0, 0, rows, prefill_rows, under_pressure=False) >= 1, (
        "an empty batch always takes one"
    )


@given(SMALL, SMALL)
def test_r14_under_pressure_one_row_at_a_time_makes_progress(
    admitted: int, prefilling: int
) -> None:
    assert free_rows(admitted, prefilling, 8, 4, under_pressure=True) == (admitted == 0)


@given(st.integers(0, 200_000), st.integers(1, 4096), st.sampled_from([1, 64, 512]))
def test_chunks_end_where_those_of_other_prompts_do(start: int, tokens: int, step: int) -> None:
    rounded = round_chunk(start, tokens, step)
    assert tokens / 2 <= rounded <= tokens
    if tokens >= 4 * step:
        assert (start + rounded) % step == 0
    if step == 1:
        assert rounded == tokens


def test_lengths_of_a_long_prompt_recur() -> None:
    """Whatever the controller allows: 60,000 tokens in chunks of odd sizes end at multiples of 512
    only."""
    dice, at, ends = random.Random(1), 77, set[int]()
    while at < 60_000:
        at += round_chunk(at, dice.randrange(1100, 2049), 512)
        ends.add(at)
    assert all(end % 512 == 0 for end in ends)
