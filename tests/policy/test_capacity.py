"""Capacities of rows' buffers, and the bytes that rows count."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.cache_janitor import FixedMemory
from trouper.engine.passes.pass_shapes import EXACT, NO_CUDNN, ROUNDED
from trouper.protocol.health import AdapterStats, CacheStats, SchedulerStats
from trouper.protocol.kv import SHARED_TOKENS, KvLayout, bank_level, kv_capacity, lowest_level
from trouper.protocol.model import MemoryStats

TOKENS = st.integers(1, 2_000_000)
STEPS = st.sampled_from((1, 4, 16, 256))


@given(TOKENS, STEPS)
def test_a_capacity_is_at_most_a_quarter_more(tokens: int, step: int) -> None:
    capacity = kv_capacity(tokens, step)
    assert tokens <= capacity < max(tokens + step, 1.25 * tokens)
    assert kv_capacity(capacity, step) == capacity <= kv_capacity(tokens + 1, step)


@given(st.integers(1, 10**6), st.integers(0, 1000), st.integers(0, 1000))
def test_what_a_pass_dequantizes_and_rings_hold_beyond_their_window_counts(
    tokens: int, dequantized: int, slack: int
) -> None:
    plain = KvLayout(token_bytes=1000, snapshot_bytes=50)
    kv = attrs.evolve(plain, dequantized_token_bytes=dequantized, ring_slack_bytes=slack)
    assert kv.row_bytes(tokens) - plain.row_bytes(tokens) >= dequantized * tokens + slack
    fitting = kv.max_tokens(10**8)
    assert fitting is not None and kv.row_bytes(fitting) <= 10**8 < kv.row_bytes(fitting + 1)


@given(
    st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 9))),
    st.sampled_from((None, 0, 64, 512)),
)
def test_rows_together_count_what_the_banks_of_their_lengths_may_hold(
    rows: list[tuple[int, int]], first: int | None
) -> None:
    kv = KvLayout(token_bytes=1000, first_bank=first)
    lengths, shared = dict[int, list[int]](), set[int]()
    for tokens, more in rows:
        level = bank_level(tokens + more, first) if first else 0
        lengths.setdefault(level, []).append(tokens + more)
        if first and lowest_level(tokens, first) != level:
            shared.add(lowest_level(tokens, first))
    expected = 0
    for level, found in lengths.items():
        longest = (first or 0) << level
        if first == 0 or (level and longest > SHARED_TOKENS):
            expected += sum(map(kv.row_bytes, found))
        else:
            together = len(found) > 1 or level in shared
            expected += len(found) * kv.row_bytes(max(longest if together else 0, *found))
    assert kv.batch_bytes([(tokens, tokens + more) for tokens, more in rows]) == expected


LAYOUTS = st.builds(
    KvLayout,
    token_bytes=st.just(1000),
    first_bank=st.sampled_from((None, 0, 64, 512)),
    lead_tokens=st.sampled_from((0, 16)),
    capacity_step=st.sampled_from((16, 256)),
)


@given(LAYOUTS, st.integers(1, 40_000), st.integers(0, 9), st.data())
def test_a_usage_stays_the_same_while_it_lasts(
    kv: KvLayout, tokens: int, more: int, data: st.DataObject
) -> None:
    """Whatever of its tokens were in flight: the engine knows them later than the plans that sample
    them."""
    usage = kv.usage(tokens, tokens + more)
    grown = data.draw(st.integers(0, max(usage.lasts - 1, 0)))
    known = data.draw(st.integers(tokens, tokens + more + grown))
    later = kv.usage(known, tokens + more + grown)
    if usage.lasts:
        assert later[:2] == usage[:2]
        assert kv.row_bytes(later.reserved) == kv.row_bytes(usage.reserved)
        after = kv.usage(tokens + usage.lasts, tokens + more + usage.lasts)
        assert after[:2] != usage[:2] or kv.row_bytes(after.reserved) != kv.row_bytes(
            usage.reserved
        ), "it lasts longer"


@given(TOKENS)
def test_the_engine_rounds_so_or_less(tokens: int) -> None:
    assert EXACT.capacity(tokens) <= kv_capacity(tokens)
    assert ROUNDED.capacity(tokens) <= kv_capacity(tokens + NO_CUDNN)


def test_there_are_few_capacities() -> None:
    assert len({kv_capacity(tokens) for tokens in range(1, 131_073)}) < 50


@given(
    st.integers(0, 10**9),
    STEPS,
    st.integers(1, 5000),
    st.integers(0, 10**6),
    st.sampled_from([0, 72]),
)
def test_what_fits_is_the_longest_that_fits(
    nbytes: int, step: int, token_bytes: int, snapshot_bytes: int, lead: int
) -> None:
    kv = KvLayout(
        token_bytes=token_bytes, snapshot_bytes=snapshot_bytes, capacity_step=step, lead_tokens=lead
    )
    fitting = kv.max_tokens(nbytes)
    assert fitting is not None
    assert not fitting or kv.row_bytes(fitting) <= nbytes
    assert kv.row_bytes(fitting + 1) > nbytes


def test_a_row_without_tokens_bytes_may_have_any_length() -> None:
    assert KvLayout(snapshot_bytes=10).max_tokens(10) is None
    assert KvLayout(snapshot_bytes=10).max_tokens(9) == 0


def test_fixed_memory_is_the_smaller_of_two_looks_in_a_row_without_rows() -> None:
    fixed = FixedMemory()

    def look(active: int, rows: int = 0, cached: int = 0) -> int:
        stats = SchedulerStats(active_sequences=rows, cache=CacheStats(bytes=cached))
        return fixed.measured(
            MemoryStats(active_bytes=active, spare_bytes=0, limit_bytes=100), stats
        )

    assert look(50) == 0, "a row may have left a moment ago"
    assert look(40, cached=10) == 30
    assert look(90, rows=2) == 30, "rows run"
    assert look(70) == 30
    assert look(45, cached=5) == 40
    assert look(60) == 40


def test_adapters_are_no_fixed_memory() -> None:
    fixed, held = FixedMemory(), AdapterStats(held_bytes=7)

    def look(active: int, adapters: AdapterStats) -> int:
        stats = MemoryStats(active_bytes=active, spare_bytes=0, limit_bytes=100)
        return fixed.measured(stats, SchedulerStats(), adapters)

    assert [look(50, held), look(50, held)] == [0, 43]
    loading = AdapterStats(held_bytes=7, reserved_bytes=5)
    assert [look(20, loading), look(20, held), look(52, held)] == [43, 43, 13], (
        "not while one is loaded"
    )
