"""F8: the disk is asked when it is expected to be faster than computing, and is not written off for
ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.scheduling.disk_tier import FIRST_BYTES_PER_S, LATENCY_S, ReadSpeed

MB = 2**20


def slow() -> ReadSpeed:
    speed = ReadSpeed()
    for now in range(30):
        speed.measured(10 * MB, 10.0, now)
    return speed


def test_f8_what_is_computed_sooner_is_not_read() -> None:
    speed = ReadSpeed()
    assert speed.worth(10 * MB, 1.0, 0)
    assert not speed.worth(10 * MB, 0.02, 0)
    assert not speed.worth(1, LATENCY_S, 0)


def test_f8_a_slow_disk_is_asked_seldom() -> None:
    speed, asked = slow(), 0
    for now in range(30, 3630):
        if speed.worth(10 * MB, 0.5, now):
            asked += 1
            speed.measured(10 * MB, 10.0, now)
    assert 1 <= asked <= 600, "an hour of requests, one a second"


def test_slow_reads_are_forgiven() -> None:
    """A busy machine's. Before, no load was ever asked for again, so that nothing was measured
    either."""
    speed = slow()
    assert not speed.worth(10 * MB, 0.2, 30)
    assert speed.worth(10 * MB, 0.2, 30 + 300)


@given(
    st.lists(
        st.tuples(st.integers(0, 100 * MB), st.floats(1e-4, 10), st.floats(0, 1e4)), max_size=50
    )
)
def test_it_is_never_taken_for_faster_than_it_was_seen(
    reads: list[tuple[int, float, float]],
) -> None:
    speed, best, now = ReadSpeed(), FIRST_BYTES_PER_S, 0.0
    for nbytes, seconds, later in reads:
        now += later
        speed.measured(nbytes, seconds, now)
        best = max(best, nbytes / seconds if seconds else 0)
        assert 0 < speed.expected(now + later) <= best * (1 + 1e-9)
