"""When a step's tokens are read: engine/step_loop.py."""

from __future__ import annotations

from trouper.engine.step_loop import LARGE_KV, PAUSE_STEPS, SURE, ReadAhead


def steps(reading: ReadAhead, waited_s: float, count: int) -> list[bool]:
    said = []
    for _ in range(count):
        reading.record(waited_s, 0.02)
        said.append(reading.early)
    return said


def test_a_device_that_is_always_done_is_asked_early_once_that_is_sure() -> None:
    assert steps(ReadAhead(), 0.0001, SURE + 2) == [False] * (SURE - 1) + [True] * 3


def test_a_device_that_keeps_the_thread_waiting_is_never_asked_early() -> None:
    assert not any(steps(ReadAhead(), 0.01, 1000))


def test_who_waited_when_asked_early_is_left_in_peace_for_a_while() -> None:
    reading = ReadAhead()
    steps(reading, 0.0001, SURE)
    assert steps(reading, 0.01, 1) == [False]
    assert not any(steps(reading, 0.0001, PAUSE_STEPS))
    assert any(steps(reading, 0.0001, SURE))


def test_one_long_wait_among_short_ones_begins_the_count_again() -> None:
    reading = ReadAhead()
    steps(reading, 0.0001, SURE - 1)
    steps(reading, 0.01, 1)
    assert not any(steps(reading, 0.0001, SURE - 1))


def test_much_kv_is_not_copied_by_a_step_that_starts_early() -> None:
    assert not ReadAhead().reads_early(lambda: LARGE_KV)
    assert ReadAhead().reads_early(lambda: LARGE_KV + 1)
    assert ReadAhead(early=True).reads_early(lambda: 0)
