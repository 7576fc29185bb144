"""Memory against the device's limit, and the bound under the system's memory pressure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.cache_janitor import MAX_KEPT, MAX_LOOKS, PressureBound, ProcessMemory, judge
from trouper.protocol.health import MemoryPressure, MemoryStatus
from trouper.protocol.model import MemoryStats

GIB = 2**30
SIZES = st.integers(0, 200 * GIB)


def memory(active: int, spare: int, limit: int = 100) -> MemoryStats:
    return MemoryStats(active_bytes=active, spare_bytes=spare, limit_bytes=limit)


@given(SIZES, SIZES, st.integers(1, 512 * GIB), st.floats(0.05, 1))
def test_r14_pressure_is_relative_to_the_devices_own_limit(
    active: int, spare: int, limit: int, fraction: float
) -> None:
    status = judge(memory(active, spare, limit), MemoryStatus(), fraction)
    assert status.under_pressure == (active > limit * fraction)
    assert (status.active_bytes, status.spare_bytes, status.limit_bytes) == (active, spare, limit)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 10**9))
def test_r14_the_same_judgement_on_a_small_and_a_large_device(
    active: int, spare: int, scale: int
) -> None:
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


class TestProcessMemory:
    """What heaps keep after many rows is asked back when few are left, and once."""

    def played(self, *looks: tuple[int, int]) -> list[bool]:
        """Of bytes and rows."""
        process = ProcessMemory()
        return [process.is_worth_releasing(resident, rows) for resident, rows in looks]

    def test_after_a_burst_beside_a_stream(self) -> None:
        assert self.played((100, 1), (100, 1), (180, 32), (180, 1), (101, 1), (101, 1)) == [
            False,
            False,
            False,
            True,
            False,
            False,
        ]

    def test_a_burst_between_two_looks(self) -> None:
        assert self.played((100, 1), (180, 1)) == [False, True]

    def test_not_while_the_rows_are_there(self) -> None:
        """Those that are left would fault their pages in again: with half of them that paused
        streams for over a second."""
        assert not any(self.played((100, 0), (180, 64), (180, 32), (190, 9)))
        assert self.played((100, 0), (180, 64), (180, 8)) == [False, False, True]

    def test_what_is_not_given_back_is_asked_for_later_and_later(self) -> None:
        asked = [
            look for look, asked in enumerate(self.played((100, 1), *[(180, 1)] * 40)) if asked
        ]
        assert asked == [1, 2, 4, 8, 16, 24, 32, 40]

    def test_what_a_long_row_needs_is_asked_back_after_its_end(self) -> None:
        """While it runs nothing can be given back; that must not be taken for what the process
        always needs."""
        process = ProcessMemory()
        for rows in (1, *[2] * 40):
            process.is_worth_releasing(100 if rows == 1 else 180, rows)
        assert any(process.is_worth_releasing(180, 1) for _ in range(MAX_LOOKS + 1))
        assert not process.is_worth_releasing(102, 1)

    def test_a_release_that_gains_something_is_followed_by_another_at_once(self) -> None:
        assert self.played((100, 1), (300, 1), (300, 1), (300, 1), (300, 1), (200, 1)) == [
            False,
            True,
            True,
            False,
            True,
            False,
        ]
        assert self.played((100, 1), (300, 1), (250, 1), (200, 1), (150, 1)) == [
            False,
            True,
            True,
            True,
            True,
        ]

    def test_little_creeping_is_not_taken_for_what_the_process_needs(self) -> None:
        """Seen: 755, 795, 822, 843, 869 MB, each time called settled after two releases that had
        gained nothing."""
        process = ProcessMemory()
        for resident in (755, *[795] * 9, *[822] * 9, *[869] * 20):
            process.is_worth_releasing(resident, 1)
        assert process.lowest_bytes == 755
        assert any(process.is_worth_releasing(869, 1) for _ in range(MAX_LOOKS + 1))

    def test_a_release_that_comes_late_was_not_in_vain(self) -> None:
        assert self.played((100, 1), (180, 1), (180, 1), (102, 1), (180, 1)) == [
            False,
            True,
            True,
            False,
            True,
        ]

    def test_a_burst_before_the_next_look(self) -> None:
        """What it had before the first burst is not forgotten for the second one."""
        assert self.played((100, 1), (180, 1), (140, 20), (140, 1)) == [False, True, False, True]

    def test_little_is_left_alone(self) -> None:
        assert not any(self.played((100, 1), (int(100 * MAX_KEPT), 1)))

    def test_a_process_that_has_less_than_before_has_settled(self) -> None:
        assert self.played((100, 1), (50, 1), (60, 1)) == [False, False, True]

    def test_where_nothing_is_known_nothing_is_asked(self) -> None:
        assert not any(self.played((0, 0), (0, 32), (0, 0)))


# -- the system's memory pressure ---------------------------------------------------------------

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
