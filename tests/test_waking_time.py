"""A process that was stopped is not late: the source of the time jumps, as it does behind
SIGCONT."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trouper.system.waking_time import LOOK_S, MAX_GAP_S, WakingClock, WakingTime


class Source:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_time_passes_as_it_does_while_somebody_looks() -> None:
    source = Source()
    waking = WakingTime(source)
    began = waking.now()
    for _ in range(100):
        source.at += LOOK_S
        waking.now()
    assert waking.now() - began == pytest.approx(100 * LOOK_S)


@pytest.mark.parametrize("stopped_s", [MAX_GAP_S + 0.1, 12.0, 1e6])
def test_a_jump_does_not_count(stopped_s: float) -> None:
    source = Source()
    waking = WakingTime(source)
    began = waking.now()
    for jumps in (1, 2):
        source.at += stopped_s
        assert waking.now() - began == pytest.approx(jumps * LOOK_S)


def test_no_deadline_passes_while_the_process_is_stopped() -> None:
    """Nor while it sleeps for long: the loop looks often."""
    source = Source()

    async def main() -> float:
        with trio.fail_after(5.0):
            await wait_all_tasks_blocked()
            source.at += 12.0
            await trio.lowlevel.checkpoint()
            await wait_all_tasks_blocked()
        began = trio.current_time()
        with trio.move_on_after(5.0) as limit:
            while True:
                source.at += LOOK_S
                await trio.lowlevel.checkpoint()
        assert limit.cancelled_caught
        return trio.current_time() - began

    assert trio.run(main, clock=WakingClock(source)) == pytest.approx(5.0, abs=LOOK_S)


def test_the_loop_sleeps_no_longer_than_it_may() -> None:
    clock = WakingClock(source := Source())
    assert clock.deadline_to_sleep_time(clock.current_time() + 0.2) == pytest.approx(0.2)
    assert clock.deadline_to_sleep_time(float("inf")) == LOOK_S
    source.at += 1000.0
    assert clock.deadline_to_sleep_time(clock.current_time() - 1.0) < 0
