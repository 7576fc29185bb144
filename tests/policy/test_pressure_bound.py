"""Rows and cached blocks get less where the system says that memory is short, and all again when it
is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.cache_janitor import PressureBound, judge
from trouper.protocol.health import MemoryPressure, MemoryStatus
from trouper.protocol.model import MemoryStats

GIB = 2**30
LIMIT = 100 * GIB
LEAST = LIMIT // 1024


def stats(pressure: MemoryPressure, swapped: int = 0) -> MemoryStats:
    return MemoryStats(
        active_bytes=0, spare_bytes=0, limit_bytes=LIMIT, pressure=pressure, swapped_bytes=swapped
    )


def bounds(bound: PressureBound, *looks: tuple[MemoryPressure, int]) -> list[int]:
    """After looks at a pressure while rows and blocks use so many bytes."""
    found = []
    for pressure, used in looks:
        bound.look(stats(pressure), used)
        found.append(bound.bound_bytes)
    return found


def test_a_warning_takes_a_tenth_of_what_is_in_use_and_a_critical_state_a_third() -> None:
    looks: tuple[tuple[MemoryPressure, int], ...] = (
        ("warning", GIB),
        ("warning", GIB),
        ("critical", GIB // 2),
    )
    assert bounds(PressureBound(), *looks) == [
        GIB * 9 // 10,
        int(GIB * 9 // 10 * 0.9),
        int(GIB // 2 * 0.67),
    ]


def test_it_is_never_so_small_that_it_returns_late() -> None:
    assert bounds(PressureBound(), ("critical", 0), ("critical", 0)) == [LEAST, LEAST]


def test_without_pressure_there_is_no_bound_and_it_ends_slowly() -> None:
    bound = PressureBound()
    assert bounds(bound, ("normal", 50 * GIB), ("unknown", 50 * GIB)) == [0, 0]
    bound.look(stats("warning"), 50 * GIB)
    seen = [bound.bound_bytes]
    while bound.bound_bytes:
        bound.look(stats("normal"), 10 * GIB)
        seen.append(bound.bound_bytes)
    assert seen == [*sorted(seen[:-1]), 0] and 3 < len(seen) < 20


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("normal", "warning", "critical", "unknown")), st.integers(0, LIMIT)
        ),
        max_size=30,
    )
)
def test_it_is_below_what_is_in_use_while_memory_is_short(
    looks: list[tuple[MemoryPressure, int]],
) -> None:
    bound = PressureBound()
    for pressure, used in looks:
        bound.look(stats(pressure), used)
        assert 0 <= bound.bound_bytes < LIMIT
        if pressure in ("warning", "critical"):
            assert 0 < bound.bound_bytes <= max(LEAST, used * 9 // 10)


def test_swap_that_grows_is_a_warning_and_swap_that_is_there_is_none() -> None:
    """An M5 had 40.0 of 40.9 GB of swap in use while its kernel said normal
    (CambrianTech/continuum#3877): what was swapped stays."""
    bound = PressureBound()
    swapped = 40 * 10**9
    assert bound.look(stats("normal", swapped), 1000) == "normal"
    assert bound.look(stats("normal", swapped), GIB) == "normal"
    assert bound == PressureBound(0, swapped)
    assert bound.look(stats("normal", swapped + GIB), GIB) == "warning"
    assert bound == PressureBound(GIB * 9 // 10, swapped + GIB)
    assert bound.look(stats("critical", swapped + 2 * GIB), 900) == "critical", "the worse of both"
    assert bound.look(stats("normal", swapped), 500) == "normal"


def test_requests_wait_and_spare_buffers_go_while_memory_is_short() -> None:
    plenty = MemoryStats(active_bytes=10, spare_bytes=30, limit_bytes=100, pressure="critical")
    status = judge(plenty, MemoryStatus(), 0.9)
    assert (status.under_pressure, status.releases, status.pressure) == (True, 1, "critical")
