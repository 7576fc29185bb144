"""How many BLAS threads decode steps use, on machines of which only the times of steps are
known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from random import Random

import mlx.core as mx
import pytest

from tests.arithmetic import cpu_only
from trouper.workarounds import openblas_threads
from trouper.workarounds.mlx_reference_blas import load_fast
from trouper.workarounds.openblas_threads import (
    BlasThreads,
    CpuTimes,
    FreeCores,
    ThreadTuner,
    read_cpu_times,
)

Times = Mapping[int, float]
IDLE, BUSY = {1: 0.0295, 2: 0.0290}, {1: 0.034, 2: 0.060}
"""Seconds of a step with one and two threads: measured with the embedded model on two cores."""
MANY = {16: 0.010, 8: 0.0101, 4: 0.013, 2: 0.025, 1: 0.050}


def run(tuner: ThreadTuner, steps: int, times: Callable[[int], float]) -> list[int]:
    """Numbers of threads of the steps."""
    used = []
    for _ in range(steps):
        used.append(tuner.next)
        tuner.record(times(tuner.next))
    return used


def steady(times: Times) -> Callable[[int], float]:
    return lambda threads: times[threads]


def test_equal_times_take_fewer_threads_so_that_the_event_loop_has_a_core() -> None:
    tuner = ThreadTuner(2, 2)
    assert run(tuner, 7, steady(IDLE)) == [2] * 7
    run(tuner, 20, steady(IDLE))
    assert tuner.threads == 1


def test_a_core_that_others_use_costs_one_thread_within_some_steps() -> None:
    tuner = ThreadTuner(2, 2)
    run(tuner, 400, steady({1: 0.055, 2: 0.030}))
    assert tuner.threads == 2
    run(tuner, 20, steady(BUSY))
    assert tuner.threads == 1
    run(tuner, 40, steady({1: 0.055, 2: 0.030}))
    assert tuner.threads == 2


def test_the_fewest_threads_that_are_not_slower_are_found_by_halves() -> None:
    tuner = ThreadTuner(16, 16)
    run(tuner, 40, steady(MANY))
    assert tuner.threads == 8
    used = run(tuner, 4000, steady(MANY))
    assert used.count(8) > 0.98 * len(used), "trials are rare"


@pytest.mark.parametrize("seed", range(20))
def test_times_that_scatter_cost_little(seed: int) -> None:
    """Two threads take 0.6 of the time of one, and one step in ten is three times as long."""
    dice, tuner = Random(seed), ThreadTuner(2, 2)

    def times(threads: int) -> float:
        return (
            {1: 0.05, 2: 0.03}[threads] * dice.uniform(0.9, 1.1) * (3 if dice.random() < 0.1 else 1)
        )

    used = run(tuner, 3000, times)
    assert used.count(2) > 0.9 * len(used)


class Machine:
    """Two cores, of which other programs use some."""

    def __init__(self) -> None:
        self.now = 0.0
        self.times = CpuTimes(0.0, 0.0)
        self.cores = FreeCores(lambda: self.times, lambda: self.now)
        self.cores._number = 2

    def run(self, seconds: float, *, others: float, own: float) -> None:
        """others, own: cores that are used, of two."""
        self.now += seconds
        idle = 2 - others - own
        self.times = CpuTimes(self.times.free + seconds * idle, self.times.own + seconds * own)


def test_cores_that_other_programs_use_are_not_free() -> None:
    machine = Machine()
    machine.run(1, others=0, own=2)
    assert machine.cores.count() == 2
    machine.run(1, others=1.5, own=0.5)
    assert machine.cores.count() == 1
    machine.run(1, others=1.9, own=0)
    assert machine.cores.count() == 1, "at least one"
    machine.run(1, others=0.1, own=0)
    assert machine.cores.count() == 2


def test_times_are_read_at_most_four_times_a_second() -> None:
    machine = Machine()
    machine.run(0.2, others=2, own=0)
    assert machine.cores.count() == 2
    machine.run(0.1, others=2, own=0)
    assert machine.cores.count() == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat is Linux's")
def test_the_system_tells_what_is_free() -> None:
    before, after = read_cpu_times(), read_cpu_times()
    assert 0 < before.free <= after.free
    assert 0 < before.own < after.own


def test_a_step_uses_no_core_of_others_from_the_next_look_on() -> None:
    """A prompt's step has no time to try, and threads that wait for each other are many times
    slower."""
    machine = Machine()
    threads = BlasThreads(None, machine.cores)
    threads._max_threads = threads._bound = 2
    assert [threads._number(rows) for rows in (0, 1)] == [2, 2]
    machine.run(1, others=1, own=1)
    threads.record(1, 0.03)
    assert [threads._number(rows) for rows in (0, 1, 4)] == [1, 1, 1]
    machine.run(1, others=0, own=1)
    threads.record(1, 0.03)
    assert threads._number(0) == 2
    for _ in range(30):
        threads.record(1, {1: 0.055, 2: 0.030}[threads._number(1)])
    assert threads._number(1) == 2, "decode steps try more at once"


@cpu_only
def test_the_number_of_threads_is_the_process_s_and_comes_back() -> None:
    """Steps that do anything but decode use all threads."""
    library = load_fast()
    if library is None:
        pytest.skip("MLX uses its own BLAS")
    blas, before = openblas_threads._opened(library)
    threads = BlasThreads(library, Machine().cores)
    threads._max_threads = threads._bound = 2
    try:
        for _ in range(30):
            threads.begin(1)
            threads.record(1, IDLE[blas.scipy_openblas_get_num_threads()])
        threads.begin(1)
        assert blas.scipy_openblas_get_num_threads() == 1
        threads.begin(0)
        assert blas.scipy_openblas_get_num_threads() == 2
    finally:
        blas.scipy_openblas_set_num_threads(before)


@cpu_only
def test_it_is_still_needed() -> None:
    """OpenBLAS keeps the number of threads that it was started with, whatever its products take."""
    library = load_fast()
    if library is None:
        pytest.skip("MLX uses its own BLAS")
    blas, before = openblas_threads._opened(library)
    for _ in range(30):
        mx.eval(mx.matmul(mx.ones((1, 64)), mx.ones((64, 64)), stream=mx.cpu))
    assert blas.scipy_openblas_get_num_threads() == before
