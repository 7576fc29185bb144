"""Memory against the device's own limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.janitor import judge
from trouper.protocol.health import MemoryStatus
from trouper.protocol.model import MemoryFacts

GIB = 2**30
SIZES = st.integers(0, 200 * GIB)


def memory(active: int, spare: int, limit: int = 100) -> MemoryFacts:
    return MemoryFacts(active_bytes=active, spare_bytes=spare, limit_bytes=limit)


@given(SIZES, SIZES, st.integers(1, 512 * GIB), st.floats(0.05, 1))
def test_r14_pressure_is_relative_to_the_devices_own_limit(
    active: int, spare: int, limit: int, fraction: float
) -> None:
    status = judge(memory(active, spare, limit), MemoryStatus(), fraction)
    assert status.under_pressure == (active > limit * fraction)
    assert (status.active_bytes, status.spare_bytes, status.limit_bytes) == (active, spare, limit)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 10**9))
def test_r14_the_same_judgement_on_a_small_and_a_large_device(active: int, spare: int, scale: int) -> None:
    small = judge(memory(active, spare), MemoryStatus(), 0.9)
    large = judge(memory(active * scale, spare * scale, 100 * scale), MemoryStatus(), 0.9)
    assert (small.under_pressure, small.releases) == (large.under_pressure, large.releases)


def test_spare_memory_is_asked_back_before_requests_have_to_wait() -> None:
    status = judge(memory(80, 15), MemoryStatus(), 0.9)
    assert (status.under_pressure, status.releases) == (False, 1)


def test_nothing_is_asked_below_the_bound_or_when_there_is_nothing_to_give() -> None:
    assert judge(memory(50, 30), MemoryStatus(), 0.9).releases == 0
    assert judge(memory(95, 0), MemoryStatus(), 0.9).releases == 0
    assert judge(memory(95, 1), MemoryStatus(), 0.9).releases == 0, "not worth it"


def test_f25_what_was_not_given_is_not_asked_for_again() -> None:
    asked = judge(memory(95, 10), MemoryStatus(), 0.9)
    assert judge(memory(95, 10), asked, 0.9, kept_bytes=10).releases == asked.releases
    assert judge(memory(95, 30), asked, 0.9, kept_bytes=10).releases == asked.releases + 1
